"""The fuzzer finds nothing in the session core, and finds what is planted there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miles_hpc.rollout.session import samples
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.history import Attachment, History, TreeHistory
from miles_hpc.rollout.session.matching import Matcher
from miles_hpc.rollout.session.template import HuggingFaceTemplate, Junction
from tools.fuzz_session.__main__ import fuzz, main
from tools.fuzz_session.templates import STYLES
from tools.fuzz_session.world import Violation


@pytest.mark.parametrize("style", STYLES)
def test_nothing_is_found(style: str) -> None:
    result = fuzz(700, 11, [style], [])
    assert result["turns"][style] >= 700
    assert set(result["refused"]) == {"400", "404", "409"}


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


ATTACH, SAMPLE = TreeHistory.attach, samples._sample

PLANTED = [
    ("a turn closed twice", HuggingFaceTemplate, "junction", closed_twice),
    ("cut turns go on", "miles_hpc.rollout.session.history", "_check_ended", never_cut),
    ("any path fits", History, "_repeats", any_path),
    ("every message matches", Matcher, "__call__", everything_matches),
    ("not the deepest", TreeHistory, "attach", first_fit),
    ("prompts are trained", samples, "_sample", masked_all),
    ("shared completions are trained again", samples, "_sample", trained_again),
    ("log-probs are shifted", samples, "_sample", log_probs_by_one),
]


@pytest.mark.parametrize(("target", "name", "bug"), [row[1:] for row in PLANTED], ids=[row[0] for row in PLANTED])
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, bug: Any) -> None:
    if isinstance(target, str):
        monkeypatch.setattr(f"{target}.{name}", bug)
    else:
        monkeypatch.setattr(target, name, bug)
    with pytest.raises(Violation, match="seed 5, session"):
        fuzz(3000, 5, ["chatml", "headers"], [])


def test_the_program_says_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--turns", "50", "--styles", "chatml", "--json"]) == 0
    assert '"turns": {"chatml":' in capsys.readouterr().out
    monkeypatch.setattr(Session, "close", lambda self: None)
    assert main(["--turns", "50", "--styles", "chatml"]) == 1
    assert "violated: seed 0, session 0, chatml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--styles", "nothing"])
