"""Which bound a command met, from what was seen; the real ones are in tests/conformance/test_sandbox_escapes.py."""

from __future__ import annotations

import signal

import pytest

from miles_hpc.core.messages import SandboxResult, decode, encode
from miles_hpc.core.types import SandboxLimit
from miles_hpc.rollout.sandbox_bounds import Use, limit_met

CPU, FILE = 128 + signal.SIGXCPU, 128 + signal.SIGXFSZ


@pytest.mark.parametrize(
    ("exit_code", "use", "timed_out", "overflow", "limit"),
    [
        (0, Use(), False, False, SandboxLimit.NONE),
        (1, Use(23), False, False, SandboxLimit.NONE),
        (137, Use(), False, False, SandboxLimit.NONE),  # by itself, or by the kernel for want of memory
        (137, Use(), True, False, SandboxLimit.TIME),
        (137, Use(), False, True, SandboxLimit.OUTPUT),
        (137, Use(24, full=True), False, True, SandboxLimit.OUTPUT),
        (254, Use(24), False, False, SandboxLimit.PROCESSES),
        (137, Use(25), True, False, SandboxLimit.PROCESSES),
        (1, Use(3, full=True), False, False, SandboxLimit.FOLDER),
        (137, Use(3, full=True), True, False, SandboxLimit.FOLDER),
        (CPU, Use(2), False, False, SandboxLimit.CPU),
        (FILE, Use(2), False, False, SandboxLimit.FILE),
        (FILE, Use(2, full=True), False, False, SandboxLimit.FOLDER),
    ],
)
def test_the_first_that_holds_counts(
    exit_code: int, use: Use, timed_out: bool, overflow: bool, limit: SandboxLimit
) -> None:
    assert limit_met(exit_code, use, processes=24, timed_out=timed_out, overflow=overflow) is limit


def test_without_a_bound_of_processes_none_is_met() -> None:
    assert limit_met(1, Use(1000), processes=0, timed_out=False, overflow=False) is SandboxLimit.NONE


@pytest.mark.parametrize(
    ("answer", "use"),
    [
        ("looked 24 1", Use(24, full=True)),
        ("looked 0 0", Use()),
        ("", Use()),
        ("cleared", Use()),
        ("looked -3 0", Use()),
        ("looked 3 2", Use()),
        ("looked 3", Use()),
    ],
)
def test_what_the_launcher_answers(answer: str, use: Use) -> None:
    assert Use.parse(answer) == use


def test_the_limit_travels() -> None:
    for limit in SandboxLimit:
        result = SandboxResult(exit_code=1, output="", truncated=False, timed_out=False, duration_s=0.0, limit=limit)
        assert decode(encode(result)) == result
