"""Slurm's times: what sbatch 22.05 made of each text, and the way back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.core.walltime import MAX_S, format_time, limit_s, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),  # a bare number is minutes
        ("30", 1800),
        ("0001", 60),
        ("4:00", 240),
        ("10:00", 600),
        ("10:00:00", 36000),  # ten hours: one site meant ten minutes
        ("1:00:00", 3600),
        ("1:60", 120),
        ("1-", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("1-00:00:00", 86400),
        ("2-00:00:00", 172800),
        ("0", 0),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("-1", math.inf),
    ],
)
def test_parse_time(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "1:2:3:4", "-5", "-0", "+1", "1.5", "1h", "1d", "1-:30", "1-2:", "1--2", "1:", ":1", "-", " 10"),
        *("10 ", "1 2", "1,2", "0x10", "\u0661\u0660", "1-2:3:4:5", "UNLIMITE", "infinity", "inf", "nan", "1:-1"),
    ],
)
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"expected Slurm's"):
        parse_time(text)


@pytest.mark.parametrize("text", ["35791394", "24855-03:14", "99999999999"])
def test_more_than_slurm_holds_is_refused(text: str) -> None:
    assert parse_time("35791393") == MAX_S
    with pytest.raises(UserError, match=r"expected 24855-03:13:00 at most"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:01", 60), ("0:31", 60), ("1:00", 60), ("1:2:3", 3780), ("0", math.inf), ("0-0", math.inf), ("-1", math.inf)],
)
def test_limits_are_whole_minutes_and_zero_is_none(text: str, seconds: float) -> None:
    assert limit_s(text) == seconds


@given(st.integers(0, MAX_S))
def test_format_and_parse_agree(seconds: int) -> None:
    assert parse_time(format_time(seconds)) == seconds


def test_format_rounds_up_and_knows_no_end() -> None:
    assert format_time(59.2) == "00:01:00"
    assert format_time(90061) == "1-01:01:01"
    assert format_time(math.inf) == "UNLIMITED"
