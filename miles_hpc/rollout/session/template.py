"""From messages to tokens, such that what was recorded is never tokenised again.

    first turn      render all messages, open an assistant turn, tokenise
    later turns     render [user, assistant, appended ...] and [user, assistant] with stand-ins for what came before:
                    the difference, with what closes an assistant turn in front, is the suffix; tokenise only that
    junction        how the suffix follows the sampled tokens

| the sampled tokens end with | junction |
|---|---|
| the token that the suffix starts with (`<|im_end|>`, the usual case) | it stands there once |
| a token that opens the next turn, but another one than the suffix does (listed in `Family.trims`) | it is dropped |
| another end-of-turn token than the suffix starts with (`<|eot_id|>` for `<|eom_id|>`) | it takes that one's place |
| anything else (a stop string ended the turn) | all of the suffix follows |

The cost of a turn follows from its new messages alone. A template must be append-only: rendering further messages may
not change how earlier ones are rendered, and what stands before the last assistant turn may not change how a suffix is.
`CHAT_FAMILIES` has what families need for that, as data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.errors import BadHistory, BrokenInvariant, SessionError
from miles_hpc.rollout.session.matching import Message
from miles_hpc.rollout.session.tokenizer import MARK, ChatTokenizer
from miles_hpc.rollout.session.turn import Tokens, Tools, copy_json

__all__ = ["CHAT_FAMILIES", "ChatFamily", "HuggingFaceTemplate", "Junction", "SessionTemplate"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_SYSTEM = ("developer", "user", "assistant", "tool")
_CALL_ID = "call00001"  # some templates ask for nine letters and digits


class Junction(NamedTuple):
    """How the next prompt follows sampled tokens: without the last `drop` of them, then `add`."""

    drop: int
    add: list[int]


class SessionTemplate(Protocol):
    """What a session asks of the tokenizer's side. Pure; raises BadHistory for messages that it can't render and
    BrokenInvariant when the tokens wouldn't continue what was recorded.
    """

    @property
    def max_trim_tokens(self) -> int:
        """The most that a junction may drop."""

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens of a conversation's first prompt, an assistant turn opened at its end."""

    def suffix(self, before: Message, appended: Sequence[Message], tools: Tools) -> list[int]:
        """Tokens from the end of the assistant message `before` to the next opened assistant turn."""

    def junction(self, sampled: Tokens, suffix: list[int]) -> Junction:
        """How `suffix` follows the sampled tokens of the turn before."""

    def text(self, sampled: Tokens) -> str:
        """What the assistant said: the sampled tokens as text, without the one that ends the turn."""


@dataclass(frozen=True, kw_only=True)
class ChatFamily:
    """What a family of chat templates needs beyond its files.

    `trims`: tokens, spelled out, that a model may sample to end its turn and that belong to the next turn.
    `variables`: template variables that keep it append-only. `appended`: roles that may follow an assistant turn.
    `keeps_sampled`: what the model sampled stays in the prompt although the template, rendering all anew, would leave
    a part of it out (an earlier turn's thinking) or put something in front. `rounds_alike`: every round of tool results
    is written as a conversation's first one is, although the template, rendering all anew, would write later ones in
    another way. `calls_alone`: the template shows tool calls of messages without content only (null), and wants their
    arguments as text.
    """

    trims: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    appended: tuple[str, ...] = _ROLES
    keeps_sampled: bool = False
    rounds_alike: bool = False
    calls_alone: bool = False


#: By Miles' names. What models add after their end token (the newline of qwen*, nemotron, minimax) follows from the
#: template itself. DeepSeek-V3's template opens the list of tool results in a conversation's first round only, and
#: takes system messages to the front wherever they stand.
CHAT_FAMILIES: Mapping[str, ChatFamily] = {
    "default": ChatFamily(),
    "qwen3": ChatFamily(keeps_sampled=True),
    "qwen35": ChatFamily(variables={"preserve_thinking": True}, appended=_NO_SYSTEM),
    "nemotron": ChatFamily(variables={"truncate_history_thinking": False}),
    "minimax": ChatFamily(appended=_NO_SYSTEM),
    "glm47": ChatFamily(trims=("<|user|>", "<|observation|>"), variables={"clear_thinking": False}),
    "deepseek_v3": ChatFamily(appended=_NO_SYSTEM, rounds_alike=True, calls_alone=True),
    "dsv4": ChatFamily(variables={"drop_thinking": False}, appended=_NO_SYSTEM),
}


class HuggingFaceTemplate:
    """`SessionTemplate` over a model folder's tokenizer and chat template. Use from one thread at a time.

    `variables` are template variables of the run, beyond the family's. Spelled-out control tokens in what clients
    send are removed: only the template opens and closes turns. The tokenizer may be one with `append_only` False, since
    every suffix is checked. Raises UserError when a token of the family's trims isn't in the vocabulary.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        family: ChatFamily = CHAT_FAMILIES["default"],
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._variables = {**(variables or {}), **family.variables}
        trims = [self._token(text) for text in family.trims]
        self._trims = frozenset(trims)
        self._stops = self._trims | set(tokenizer.stop_ids)
        #: Tokens that end an assistant turn: what an engine stops at.
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*tokenizer.stop_ids, *trims]))
        self._spoken: set[str] = set()  # roles that the template renders after an assistant turn
        self._rounds_checked: set[str] = set()  # kinds of messages
        self._shown_calls: set[bool] = set()  # of assistant messages with content, or without any
        self._tools_seen: tuple[Tools, Tools, str] | None = None  # as sent, cleaned, synthetic prefix rendered

    @property
    def max_trim_tokens(self) -> int:
        return 1 if self._trims else 0

    def check(self) -> None:
        """Whether conversations can go on after their first turn, to be asked at start. Raises UserError, which names
        families that make it so, if any do.
        """
        try:
            self._go_on()
        except SessionError as error:
            fitting = [name for name, family in CHAT_FAMILIES.items() if self._fits(family)]
            advice = f"; of the chat families, {', '.join(fitting)} would do" if fitting else ""
            raise UserError(f"{error}{advice}") from error

    def first(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        self._check_roles(messages, _ROLES)
        rows, cleaned = [self._row(m) for m in messages], self._tools(tools)[0]
        self._check_calls(rows, cleaned)
        return self._tokenizer.encode(self._render(rows, cleaned, True))

    def suffix(self, before: Message, appended: Sequence[Message], tools: Tools) -> list[int]:
        self._check_roles(appended, self._family.appended)
        cleaned, plain = self._tools(tools)
        prefix = _stand_ins()
        base = plain
        if before.get("tool_calls"):
            # Templates may close a turn of calls in another way, or look at the calls to render what the tools said.
            prefix[-1]["tool_calls"] = self._row(before)["tool_calls"]
            base = self._render(prefix, cleaned, False)
        rows = [self._row(m) for m in appended]
        self._check_spoken(prefix, rows, cleaned)
        self._check_calls(rows, cleaned)
        added = self._added(base, prefix, rows, cleaned)
        self._check_rounds(added, prefix, rows, cleaned)
        text = self._closing(plain, base) + added
        ids = self._tokenizer.encode(text)
        # Some tokenizers put a space in front of a text that starts with ordinary characters.
        if not text.startswith(self._tokenizer.special_tokens) and self._tokenizer.decode(ids) != text:
            raise BrokenInvariant(
                f"tokenizer of {self._tokenizer.folder} doesn't give back {text[:40]!r}, which follows an assistant "
                "turn: use a template that starts it with a special token"
            )
        return ids

    def junction(self, sampled: Tokens, suffix: list[int]) -> Junction:
        last = int(sampled[-1])
        first = suffix[0] if suffix else -1
        if first == last and last in self._stops:
            return Junction(0, suffix[1:])
        if last in self._trims:
            return Junction(1, suffix)
        return Junction(0, suffix[1:] if last in self._stops and first in self._stops - self._trims else suffix)

    def text(self, sampled: Tokens) -> str:
        return self._tokenizer.decode(sampled[:-1] if int(sampled[-1]) in self._stops else sampled)

    # ------------------------------------------------------------------------------------------- rendering

    def _tools(self, tools: Tools) -> tuple[Tools, str]:
        """Cleaned, and [user, assistant] rendered with them. Sessions keep their tools, so the last are kept."""
        seen = self._tools_seen
        if seen is None or seen[0] != tools:
            cleaned = self._clean(tools)
            # A copy, because a caller may edit its tools and send them again.
            seen = self._tools_seen = (copy_json(tools), cleaned, self._render(_stand_ins(), cleaned, False))
        return seen[1], seen[2]

    def _render(self, rows: Sequence[Message], tools: Tools, generate: bool) -> str:
        try:
            return self._tokenizer.render_rows(rows, generate=generate, tools=tools, variables=self._variables)
        except UserError as error:
            raise BadHistory(str(error)) from error

    def _added(self, base: str, prefix: list[dict[str, Any]], rows: list[dict[str, Any]], tools: Tools) -> str:
        """What the template appends for `rows`. `base` is `prefix` rendered, which ends with a stand-in's turn."""
        rendered = self._render([*prefix, *rows], tools, True)
        front, rest = _parted(base)
        front_now, rest_now = _parted(rendered) if front else ("", rendered)
        if not rest_now.startswith(rest) or (front_now != front and not self._family.keeps_sampled):
            roles = " ".join(str(row["role"]) for row in rows)
            raise BrokenInvariant(
                f"chat template of {self._tokenizer.folder} renders an assistant turn differently once "
                f"[{roles}] follow it: use a template that only appends, or a family whose variables make it so"
            )
        return rest_now[len(rest) :]

    def _closing(self, plain: str, base: str) -> str:
        """What the template puts after an assistant's text or calls. `base` ends with it."""
        closing = plain.partition(MARK)[2]
        if base.endswith(closing):
            return closing
        # A turn of calls ends in another way (<|eom_id|> instead of <|eot_id|>).
        for stop in (self._tokenizer.decode([stop]) for stop in self._stops):
            if base.rstrip().endswith(stop):
                return base[base.rfind(stop) :]
        raise BrokenInvariant(
            f"chat template of {self._tokenizer.folder} ends a turn of tool calls with {base[-20:]!r}, which isn't "
            "an end-of-turn token: name that token in generation_config.json (eos_token_id)"
        )

    def _row(self, message: Message) -> dict[str, Any]:
        """A message as templates expect it: content as one text, tool arguments as an object, nothing spelled out."""
        row = dict(message)
        row["content"] = _one_text(message)
        if calls := row.get("tool_calls"):
            if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
                raise BadHistory(f"tool_calls {calls!r:.60}: expected a list of objects")
            row["tool_calls"] = [_parsed_call(call) for call in calls]
            if self._family.calls_alone:
                row["tool_calls"] = [_written_call(call) for call in calls]
                row["content"] = row["content"] or None
        cleaned: dict[str, Any] = self._clean(row)
        return cleaned

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._tokenizer.plain(value)
        if isinstance(value, Mapping):
            return {self._tokenizer.plain(k) if isinstance(k, str) else k: self._clean(v) for k, v in value.items()}
        return [self._clean(v) for v in value] if isinstance(value, list | tuple) else value

    # ------------------------------------------------------------------------------------------- checks

    def _token(self, text: str) -> int:
        ids = self._tokenizer.encode(text)
        if len(ids) != 1:
            raise UserError(f"{self._tokenizer.folder}: {text} isn't one token: choose another chat family")
        return ids[0]

    def _check_roles(self, messages: Sequence[Message], allowed: Sequence[str]) -> None:
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or message.get("role") not in allowed:
                seen = repr(message.get("role")) if isinstance(message, Mapping) else type(message).__name__
                raise BadHistory(f"new message {i} has role {seen:.40}: expected {', '.join(allowed)}")
        if not messages or messages[-1]["role"] == "assistant":
            raise BadHistory("the last message is the assistant's or there is none: append one for it to answer")

    def _check_spoken(self, prefix: list[dict[str, Any]], rows: list[dict[str, Any]], tools: Tools) -> None:
        """A template that passes over a role would lose messages without a word. Roles are looked at once."""
        for i, row in enumerate(rows):
            role = row["role"]
            if role in self._spoken:
                continue
            probe = {key: value for key, value in row.items() if key != "tool_calls"} | {"content": MARK}
            before = [*prefix, *rows[:i]]  # roles may have to alternate
            without, with_probe = (self._render(talk, tools, True) for talk in (before, [*before, probe]))
            if with_probe.count(MARK) <= without.count(MARK):
                raise BadHistory(
                    f"chat template of {self._tokenizer.folder} doesn't render messages of role '{role}' "
                    "after an assistant turn: send them under another role"
                )
            self._spoken.add(role)

    def _check_calls(self, rows: list[dict[str, Any]], tools: Tools) -> None:
        """As `_check_spoken`, for tool calls of assistant messages that a client sends and nobody sampled here."""
        for row in rows:
            has_content = bool(row["content"])
            if row["role"] != "assistant" or not row.get("tool_calls") or has_content in self._shown_calls:
                continue
            probe = row | {"tool_calls": [_renamed_call(call, MARK) for call in row["tool_calls"]]}
            if MARK not in self._render([_stand_ins()[0], probe], tools, False):
                raise BadHistory(
                    f"chat template of {self._tokenizer.folder} doesn't render tool calls of an assistant message "
                    f"{'with' if has_content else 'without'} content: send them in its text"
                )
            self._shown_calls.add(has_content)

    def _check_rounds(self, added: str, prefix: list[dict[str, Any]], rows: list[dict[str, Any]], tools: Tools) -> None:
        """A template that writes a second round in another way would have to see the whole history. Kinds of messages
        are looked at once.
        """
        kinds = {f"{row['role']} with calls" if row.get("tool_calls") else row["role"] for row in rows}
        if self._family.rounds_alike or kinds <= self._rounds_checked:
            return
        earlier = [prefix[0], prefix[1] | {"content": "a"}, *rows, prefix[1]]
        if self._added(self._render(earlier, tools, False), earlier, rows, tools) != added:
            roles = " ".join(str(row["role"]) for row in rows)
            raise BrokenInvariant(
                f"chat template of {self._tokenizer.folder} renders [{roles}] differently after an earlier round of "
                "them: use another template, or a chat family with rounds_alike"
            )
        self._rounds_checked |= kinds

    def _go_on(self) -> None:
        self.suffix({"role": "assistant", "content": "a"}, [{"role": "user", "content": "b"}], [])
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        before = {"role": "assistant", "content": "a", "tool_calls": [call]}
        try:
            self.suffix(before, [{"role": "tool", "tool_call_id": _CALL_ID, "content": "b"}], [])
        except BadHistory:
            pass  # a template without tools: requests with results of tools are refused, others aren't

    def _fits(self, family: ChatFamily) -> bool:
        try:
            HuggingFaceTemplate(self._tokenizer, family, self._variables)._go_on()
        except (SessionError, UserError):
            return False
        return True


def _stand_ins() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "u"}, {"role": "assistant", "content": MARK}]


def _parted(text: str) -> tuple[str, str]:
    """What stands before the stand-in's text and what after; all of it after when the template shows only its calls."""
    front, mark, rest = text.partition(MARK)
    return (front, rest) if mark else ("", text)


def _one_text(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise BadHistory(f"content of a message of role '{message.get('role')}': expected text or parts of type 'text'")


def _parsed_call(call: Message) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        parsed = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else dict(call)


def _written_call(call: Message) -> dict[str, Any]:
    """Arguments as the text that OpenAI's shape has."""
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def _renamed_call(call: Message, name: str) -> Message:
    function = call.get("function")
    return {**call, "function": {**function, "name": name}} if isinstance(function, Mapping) else call
