"""The fuzzer finds nothing in the session core, and finds what is planted there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session import samples
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.history import Attachment, History, TreeHistory
from miles_hpc.rollout.session.matching import Matcher
from miles_hpc.rollout.session.template import CHAT_FAMILIES, HuggingFaceTemplate, Junction
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from tools.fuzz_session.__main__ import fuzz, main
from tools.fuzz_session.notes import Violation
from tools.fuzz_session.templates import STYLES, style_folder


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_found(style: str) -> None:
    result = fuzz(500, 11, [style], {})
    row = result["templates"][style]
    assert row["turns"] == result["turns"] >= 500
    assert set(row["refused"]) == {"400", "404", "409", "422"}
    assert row["branches"] > 10 and row["rollbacks"] > 5
    assert (row["not_canonical"] > 0.3) is (style != "characters")
    assert result["mismatches"] == 0


def closed_twice(self: HuggingFaceTemplate, sampled: Any, suffix: list[int]) -> Junction:
    """Closes every turn once more."""
    return Junction(0, suffix)


def never_cut(parent: Any) -> None:
    return None


def any_path(self: History, turn: Any, messages: Any, start: int) -> bool:
    return start + len(turn.messages) <= len(messages)


def everything_matches(self: Matcher, recorded: Any, sent: Any) -> bool:
    return True


def first_fit(self: TreeHistory, messages: Any, tools: Any) -> Any:
    """Goes on from the parent of the right turn."""
    found = ATTACH(self, messages, tools)
    if found.parent is None or found.parent.parent is None:
        return found
    return Attachment(found.parent.parent, found.parent.parent.n_messages)


def masked_all(path: Any, trained: set[int], *, cut: bool) -> Any:
    sample = SAMPLE(path, trained, cut=cut)
    sample.loss_mask[:] = 1
    return sample


def trained_again(path: Any, trained: set[int], *, cut: bool) -> Any:
    return SAMPLE(path, set(), cut=cut)


def log_probs_by_one(path: Any, trained: set[int], *, cut: bool) -> Any:
    sample = SAMPLE(path, trained, cut=cut)
    sample.log_probs[:] = np.roll(sample.log_probs, 1)
    return sample


def split_anew(self: HuggingFaceTemplate, before: Any, appended: Any, tools: Any) -> list[int]:
    """The same text when it is decoded: tokens that no tokenizer makes."""
    ids = SUFFIX(self, before, appended, tools)
    return [*ids[:2], *(i for c in self._tokenizer.decode(ids[2:]) for i in self._tokenizer.encode(c))]


def not_copied(value: Any) -> Any:
    return value


def only_special(self: ChatTokenizer, text: str) -> str:
    for token in self.special_tokens:
        text = text.replace(token, "")
    return text


ATTACH, SAMPLE = TreeHistory.attach, samples._sample
SUFFIX = HuggingFaceTemplate.suffix

PLANTED: list[tuple[str, str, Any, str, Any]] = [
    ("a turn closed twice", "chatml", HuggingFaceTemplate, "junction", closed_twice),
    ("a suffix is split in another way", "chatml", HuggingFaceTemplate, "suffix", split_anew),
    ("control tokens that aren't special pass", "rounds", ChatTokenizer, "plain", only_special),
    ("tool calls get lost", "rounds", HuggingFaceTemplate, "_check_calls", lambda self, rows, tools: None),
    ("cut turns go on", "chatml", "miles_hpc.rollout.session.history", "_check_ended", never_cut),
    ("any path fits", "headers", History, "_repeats", any_path),
    ("every message matches", "headers", Matcher, "__call__", everything_matches),
    ("not the deepest", "chatml", TreeHistory, "attach", first_fit),
    ("what a client edits is recorded", "chatml", "miles_hpc.rollout.session.core", "copy_json", not_copied),
    ("prompts are trained", "chatml", samples, "_sample", masked_all),
    ("shared completions are trained again", "chatml", samples, "_sample", trained_again),
    ("log-probs are shifted", "chatml", samples, "_sample", log_probs_by_one),
]


@pytest.mark.parametrize(("style", "target", "name", "bug"), [row[1:] for row in PLANTED], ids=[r[0] for r in PLANTED])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, style: str, target: Any, name: str, bug: Any) -> None:
    if isinstance(target, str):
        monkeypatch.setattr(f"{target}.{name}", bug)
    else:
        monkeypatch.setattr(target, name, bug)
    with pytest.raises(Violation, match="seed 5, session"):
        fuzz(3000, 5, [style], {})


def test_families_that_a_template_needs_are_told(tmp_path: Path) -> None:
    for style, other, text in (
        ("thinking", "default", r"differently once \[user\] follow it.*of the chat families, qwen3 would do"),
        (
            "rounds",
            "default",
            r"\[tool\] differently after an earlier round.*of the chat families, deepseek_v3 would do",
        ),
        ("chatml", "glm47", r"<\|user\|> isn't one token"),
    ):
        folder, _ = style_folder(style, tmp_path / style)
        with pytest.raises(UserError, match=text) as caught:
            fuzz(10, 1, [], {folder: CHAT_FAMILIES[other]})
        assert "\n" not in str(caught.value)


def test_the_program_says_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--turns", "50", "--styles", "chatml", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["templates"]) == ["chatml"] and result["mismatches"] == 0
    assert main(["--turns", "50", "--styles", "chatml"]) == 0
    assert "0 mismatches" in capsys.readouterr().out
    monkeypatch.setattr(Session, "close", lambda self: None)
    assert main(["--turns", "50", "--styles", "chatml"]) == 1
    assert "violated: seed 0, session 0, chatml" in capsys.readouterr().err
    assert main(["--turns", "5", "--styles", "", "--folder", "/nowhere"]) == 2
    assert "fuzz_session: error: /nowhere" in capsys.readouterr().err
    for wrong in (["--styles", "nothing"], ["--styles", ""], ["--folder", "x:nobody"]):
        with pytest.raises(SystemExit):
            main(wrong)
