r"""Rewards by rule, under Miles' `rm_type` names.

| rm_type | reads from the response | reward |
|---|---|---|
| math | the last \boxed{} | 1 or 0 |
| deepscaler | the last \boxed{} after the last `</think>`, or after `###Response`; without both: no answer | 1 or 0 |
| gemma_math | the last \boxed{} after the last `<channel\|>`, or of all of it | 1 or 0 |
| dapo | the last line `Answer: ...` of the last 300 characters | 1 or -1 |
| gpqa | the letter that it ends on, after the last `</think>` | 1 or 0 |
| f1 | all of it | word F1, 0 to 1 |
| exact_match (not in Miles) | all of it | 1 or 0 |
| random, deterministic_random | nothing: 0 or 1 by chance; by a hash of response and label | 1 or 0 |
| boxed_ and gpqa, f1, exact_match or a function | the last \boxed{} in place of the response | as without |
| module:function | a function of one's own | a finite number, or a `Graded` |

A reward is a plain function `(response, label, metadata) -> Graded | float`, pure, bounded in time and memory for any
response. `metadata["rm_type"]` of a prompt goes before the run's.
"""

from __future__ import annotations

import hashlib
import inspect
import math as floats
import random as chance
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from miles_hpc.core.errors import UserError
from miles_hpc.core.registry import names, resolve
from miles_hpc.rollout.reward import choices, words
from miles_hpc.rollout.reward.answers import answers_equal, last_boxed

__all__ = [
    "Graded",
    "Reward",
    "RewardFunction",
    "dapo",
    "deepscaler",
    "deterministic_random",
    "exact_match",
    "f1",
    "gemma_math",
    "gpqa",
    "math",
    "random",
    "resolve_reward",
    "rm_type_of",
]


@dataclass(frozen=True, slots=True)
class Graded:
    """`reward` is finite; `correct` is None where the rule doesn't say; `answer` is what was read, if anything."""

    reward: float
    correct: bool | None = None
    answer: str | None = None


RewardFunction: TypeAlias = Callable[[str, str, Mapping[str, Any]], "Graded | float"]
#: What `resolve_reward` gives: the label may also be a number.
Reward: TypeAlias = Callable[[str, "str | int | float", Mapping[str, Any]], Graded]

_ELSEWHERE = {
    "remote_rm": "asks a service of your own",
    "ifbench": "needs the benchmark's own checkers",
}
_BOXED_ALREADY = frozenset({"math", "deepscaler", "gemma_math"})
_ANSWER_LINE = re.compile(r"answer[ \t]{0,8}:[ \t*]{0,8}([^\n]+)", re.IGNORECASE)
_SHOWN_CHARS = 200


def rm_type_of(metadata: Mapping[str, Any], default: str | None) -> str:
    """The prompt's own `rm_type`, else the run's. Raises UserError when there is neither."""
    name = str(metadata.get("rm_type") or default or "").strip()
    if not name:
        raise UserError(
            f"no rm_type for this prompt: expected one of {', '.join(names('reward'))}; set it in the run file"
        )
    return name


def resolve_reward(rm_type: str) -> Reward:
    """The reward of this name. Raises UserError for an unknown one; the reward raises it for a bad label or result."""
    boxed = rm_type.startswith("boxed_")
    name = rm_type.removeprefix("boxed_")
    if name in _ELSEWHERE:
        raise UserError(
            f"rm_type '{rm_type}': it {_ELSEWHERE[name]} and isn't built in: expected one of "
            f"{', '.join(names('reward'))}; name a function of your own as module:function"
        )
    if boxed and name in _BOXED_ALREADY | {"dapo"}:
        where = "the boxed answer already" if name in _BOXED_ALREADY else "a line 'Answer: ...'"
        raise UserError(f"rm_type '{rm_type}': {name} reads {where}; use {name}")
    function = resolve("reward", name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise UserError(f"rm_type '{rm_type}': {function!r:.80}: expected a plain function (response, label, metadata)")

    def reward(response: str, label: str | int | float, metadata: Mapping[str, Any]) -> Graded:
        text = _label_text(label, rm_type)
        if boxed:
            response = last_boxed(response) or ""
        return _graded(function(response, text, metadata), rm_type)

    return reward


def _label_text(label: object, rm_type: str) -> str:
    if isinstance(label, str) or (isinstance(label, int | float) and not isinstance(label, bool)):
        return str(label)
    raise UserError(f"rm_type '{rm_type}': label {label!r:.80}: expected a text or a number; look at the prompt's data")


def _graded(result: object, rm_type: str) -> Graded:
    graded = result if isinstance(result, Graded) else None
    value = graded.reward if graded is not None else result
    if not isinstance(value, int | float) or not floats.isfinite(value):
        raise UserError(f"rm_type '{rm_type}': its function gave {result!r:.80}: expected a finite number or a Graded")
    return graded if graded is not None else Graded(float(value))


# --------------------------------------------------------------------------------------------- rules


def math(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    r"""1 when the last \boxed{} of the response is the label; a label may be boxed, too."""
    given = last_boxed(response)
    expected = last_boxed(label) if r"\boxed" in label else label
    correct = given is not None and expected is not None and answers_equal(given, expected)
    return Graded(float(correct), correct, _shown(given))


def deepscaler(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """`math` on what follows the reasoning; a response that doesn't end its reasoning has no answer."""
    for mark in ("</think>", "###Response"):
        if mark in response:
            return math(_after(response, mark), label, metadata)
    return Graded(0.0, False)


def gemma_math(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """`math` on what follows the channel of thoughts, if there is one."""
    return math(_after(response, "<channel|>"), label, metadata)


def dapo(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """1 when the last line "Answer: ..." near the end is the label, else -1 (DAPO, arXiv:2503.14476)."""
    found = _ANSWER_LINE.findall(response[-300:])
    given = found[-1].strip().rstrip("*").strip() if found else None
    if given is not None and r"\boxed" in given:
        given = last_boxed(given)
    correct = given is not None and answers_equal(given, label)
    return Graded(1.0 if correct else -1.0, correct, _shown(given))


def gpqa(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """1 when the response ends on the right letter, or gives the text of the right choice."""
    right = choices.right_letter(label, metadata)
    final = _after(response, "</think>")
    letter = choices.chosen_letter(final, choices.letters_of(metadata)) or choices.chosen_text(final, metadata)
    return Graded(float(letter == right), letter == right, letter)


def f1(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """F1 over words."""
    return Graded(words.f1(response, label), None, _shown(response))


def exact_match(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """1 when both are the same words."""
    correct = words.exact_match(response, label)
    return Graded(float(correct), correct, _shown(response))


def random(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """0 or 1 by chance: the baseline that shows what a training set-up does without a signal."""
    return Graded(float(chance.getrandbits(1)))


def deterministic_random(response: str, label: str, metadata: Mapping[str, Any]) -> Graded:
    """0 or 1, the same for the same response and label in every process."""
    digest = hashlib.blake2b(f"{len(label)}:{label}".encode("utf-8", "surrogatepass"), digest_size=1)
    for start in range(0, len(response), 1 << 20):
        digest.update(response[start : start + (1 << 20)].encode("utf-8", "surrogatepass"))
    return Graded(float(digest.digest()[0] & 1))


def _after(response: str, mark: str) -> str:
    """What follows the last mark; all of it without one."""
    at = response.rfind(mark)
    return response if at < 0 else response[at + len(mark) :]


def _shown(answer: str | None) -> str | None:
    return answer if answer is None or len(answer) <= _SHOWN_CHARS else answer[:_SHOWN_CHARS] + "..."
