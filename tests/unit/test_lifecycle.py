"""Time that is left, and the decision to go on."""

import math

from miles_hpc.cluster.lifecycle import cause_of_end, remaining_s, should_continue


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
