"""Whether a call can work, by the source of its function alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cluster.side_check import check_call
from miles_hpc.core.errors import UserError

OWN = """
raise RuntimeError("this module is never run here")
import numpy as np
from elsewhere import borrowed

def plain(a, b=1, *, c, d=2): ...
def anything(**more): ...
def apart(a, /): ...

@decorated
def wrapped(a): ...

class Thing:
    def __init__(self, a): ...

partial = make(plain)
if np:
    def either(a): ...
else:
    def either(b): ...
"""


def check(tmp_path: Path, attribute: str, **arguments: Any) -> None:
    (tmp_path / "own").mkdir(exist_ok=True)
    (tmp_path / "own" / "module.py").write_text(OWN)
    check_call([str(tmp_path)], "side job 'x'", f"own.module:{attribute}", arguments)


@pytest.mark.parametrize(
    ("attribute", "arguments"),
    [
        ("plain", {"a": 1, "c": "any kind"}),
        ("anything", {"x": 1}),
        ("wrapped", {"what": 1}),  # the rest is for the node to say
        ("Thing", {"what": 1}),
        ("partial", {"what": 1}),
        ("borrowed", {"what": 1}),
        ("either", {"b": 1}),
    ],
)
def test_calls_that_may_work(attribute: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, attribute, **arguments)


@pytest.mark.parametrize(
    ("attribute", "arguments", "says"),
    [
        (
            "plain",
            {"a": 1, "c": 1, "bb": 1},
            "'bb': own.module:plain has none of this name: did you mean 'b'?",
        ),
        ("plain", {"b": 1}, "needs a, c"),
        ("apart", {"a": 1}, "expected some of none"),
        ("plane", {}, "no 'plane': did you mean 'plain'?"),
    ],
)
def test_calls_that_cannot(attribute: str, arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        check(tmp_path, attribute, **arguments)


def test_what_cannot_be_read_here_is_left_to_the_node(tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text("def f[T](a: T: ...")
    (tmp_path / "star.py").write_text("from elsewhere import *")
    for module in ("newer", "star"):
        check_call([str(tmp_path)], "side job 'x'", f"{module}:f", {"what": 1})
    with pytest.raises(UserError, match="no module third"):
        check_call([str(tmp_path)], "side job 'x'", "third:f", {})
