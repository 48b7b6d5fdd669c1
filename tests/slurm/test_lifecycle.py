"""Whole runs that a cluster interrupts, each in another layout. All scenarios: python -m tools.lifecycle_test."""

from __future__ import annotations

import pytest

from tools.lifecycle_test import play


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.lifecycle
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("scenario", "layout"),
    [("cancel", "split"), ("no-progress", "hetjob"), ("preempt", "split_span"), ("spare", "hetjob_span")],
)
def test_the_run_comes_out_whole(scenario: str, layout: str) -> None:
    seen = play(scenario, layout)
    assert seen["audit"]["trained"] == seen["audit"]["asked"] > 0
    if scenario == "preempt":
        assert 0 < seen["notice_to_durable_s"] < 30
