"""Time limits as Slurm writes them, and the decision to go on."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.cluster.lifecycle import cause_of_end, format_time, parse_time, remaining_s, should_continue
from miles_hpc.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),  # a bare number is minutes
        ("30", 1800),
        ("4:00", 240),
        ("1:00:00", 3600),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("1-00:00:00", 86400),
        ("2-00:00:00", 172800),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("-1", math.inf),
    ],
)
def test_parse_time(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1-", "1.5", "1h"])
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"expected Slurm's"):
        parse_time(text)


@given(st.integers(0, 10**8))
def test_format_and_parse_agree(seconds: int) -> None:
    assert parse_time(format_time(seconds)) == seconds


def test_format_rounds_up_and_knows_no_end() -> None:
    assert format_time(59.2) == "00:01:00"
    assert format_time(90061) == "1-01:01:01"
    assert format_time(math.inf) == "UNLIMITED"


def test_remaining() -> None:
    assert remaining_s(110.0, 100.0) == 10.0
    assert remaining_s(90.0, 100.0) == 0.0
    assert remaining_s(None, 100.0) == math.inf


def test_one_more_step_has_to_fit_with_its_save() -> None:
    assert should_continue(100.0, step_time_s=60.0, save_time_s=30.0, margin_s=10.0)
    assert not should_continue(99.9, step_time_s=60.0, save_time_s=30.0, margin_s=10.0)
    assert should_continue(math.inf, step_time_s=1e9, save_time_s=1e9, margin_s=1e9)


def test_why_a_batch_script_got_sigterm() -> None:
    line = "slurmstepd-t1: error: *** JOB 19717003 ON t1 CANCELLED AT 2026-11-30T02:53:31{} ***\n"
    assert cause_of_end("step 1\nstep 2\n") is None
    assert cause_of_end(line.format("")) == ""
    assert cause_of_end("x\n" + line.format(" DUE TO TIME LIMIT")) == "TIME LIMIT"
    assert cause_of_end(line.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")) == "NODE FAILURE"
    assert cause_of_end(line.format(" DUE TO PREEMPTION") + line.format("")) == ""  # the last one counts
