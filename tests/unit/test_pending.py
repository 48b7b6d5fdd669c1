"""Reasons of pending jobs in words: those that Slurm 22.05.8's client library names, and any other text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.cluster.pending import CODES, explain_reason

#: Limits as the client library of Slurm 22.05.8 names them, less those that differ in the resource alone.
_LIMITS = """
    AssocGrpBB AssocGrpBBMinutes AssocGrpBBRunMinutes AssocGrpBilling AssocGrpBillingMinutes AssocGrpBillingRunMinutes
    AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpCpuLimit AssocGrpEnergy AssocGrpGRES AssocGrpGRESMinutes
    AssocGrpGRESRunMinutes AssocGrpJobsLimit AssocGrpLicense AssocGrpMemLimit AssocGrpMemMinutes AssocGrpMemRunMinutes
    AssocGrpNodeLimit AssocGrpNodeMinutes AssocGrpNodeRunMinutes AssocGrpSubmitJobsLimit AssocGrpUnknown
    AssocGrpWallLimit AssocMaxBBPerNode AssocMaxBillingMinutesPerJob AssocMaxBillingPerJob
    AssocMaxCpuMinutesPerJobLimit AssocMaxCpuPerJobLimit AssocMaxCpuPerNode AssocMaxGRESMinutesPerJob AssocMaxGRESPerJob
    AssocMaxJobsLimit AssocMaxMemPerJob AssocMaxNodeMinutesPerJob AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit
    AssocMaxWallDurationPerJobLimit MaxBBPerAccount MaxBillingPerAccount MaxCpuPerAccount MaxGRESPerAccount
    MaxJobsPerAccount MaxMemoryPerAccount MaxNodePerAccount MaxSubmitJobsPerAccount MaxUnknownPerAccount QOSGrpBB
    QOSGrpBillingMinutes QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpCpuLimit QOSGrpEnergyRunMinutes
    QOSGrpGRES QOSGrpJobsLimit QOSGrpLicense QOSGrpMemLimit QOSGrpMemoryMinutes QOSGrpMemoryRunMinutes QOSGrpNodeLimit
    QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxBBPerUser QOSMaxBillingMinutesPerJob QOSMaxCpuMinutesPerJobLimit
    QOSMaxCpuPerJobLimit QOSMaxCpuPerNode QOSMaxCpuPerUserLimit QOSMaxGRESPerJob QOSMaxGRESPerUser
    QOSMaxJobsPerUserLimit QOSMaxMemoryPerUser QOSMaxNodePerJobLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit
    QOSMaxWallDurationPerJobLimit QOSMinBilling QOSMinCpuNotSatisfied QOSMinGRES QOSMinMemory QOSMinNode
"""
LIMITS = _LIMITS.split()


@pytest.mark.parametrize("code", LIMITS)
def test_limits_are_known_by_their_parts(code: str) -> None:
    found = explain_reason(code)
    assert found.code == code and "doesn't know" not in found.meaning
    asks_too_much = "PerJob" in code or "PerNode" in code or "Min" in code.removeprefix("Assoc")[3:6]
    budget = code.removesuffix("Limit").endswith("Minutes") and "RunMinutes" not in code and "PerJob" not in code
    assert found.helps is not (asks_too_much or budget)


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_of_the_table_is_a_sentence(code: str) -> None:
    found = explain_reason(code)
    assert found.meaning and "doesn't know" not in found.meaning
    assert found.helps is not False or found.advice, "where waiting doesn't help, something must"
    assert "\n" not in found.sentence and not found.sentence.endswith(".")


def test_there_are_enough() -> None:
    assert len(CODES) >= 40 and len(LIMITS) == len(set(LIMITS)) >= 70


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("Priority", "Priority: jobs of higher priority come first; waiting helps"),
        ("(Priority)", "Priority: jobs of higher priority come first; waiting helps"),
        (
            "",
            "the scheduler hasn't looked at it yet; a het job is looked at by the backfill loop only; waiting helps",
        ),
        (
            "ReqNodeNotAvail,_UnavailableNodes:h[1-2]",
            "ReqNodeNotAvail: nodes that it needs are in use, reserved, down or in maintenance; unavailable: h[1-2]; "
            "'sinfo -R' says which of them need an operator",
        ),
        (
            "(ReqNodeNotAvail, UnavailableNodes:h[1-2],n7)",
            "ReqNodeNotAvail: nodes that it needs are in use, reserved, down or in maintenance; "
            "unavailable: h[1-2],n7; 'sinfo -R' says which of them need an operator",
        ),
        (
            "ReqNodeNotAvail(Unavailable:h1)",
            "ReqNodeNotAvail: nodes that it needs are in use, reserved, down or in maintenance; unavailable: h1; "
            "'sinfo -R' says which of them need an operator",
        ),
        (
            "ReqNodeNotAvail,_May_be_reserved_for_other_job",
            "ReqNodeNotAvail: nodes that it needs are in use, reserved, down or in maintenance "
            "(May be reserved for other job)",
        ),
        (
            "launch failed requeued held",
            "launch_failed_requeued_held: its start failed on a node: Slurm requeued it and holds it; waiting doesn't "
            "help; look at the newest attempt's log for the cause, then 'scontrol release <job id>', or cancel and "
            "resume",
        ),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions: nodes that "
            "it needs are down, drained or reserved for partitions of higher priority; 'sinfo -R' says which nodes "
            "are down and why",
        ),
        (
            "QOSMaxJobsPerUserLimit",
            "QOSMaxJobsPerUserLimit: your jobs have reached the limit of jobs of the QOS; waiting helps; "
            "a het job counts once per component",
        ),
        (
            "AssocGrpCPUMinutesLimit",
            "AssocGrpCPUMinutesLimit: the budget of CPUs x minutes of your account is used up, or this job would "
            "exceed it; waiting doesn't help; ask the project for budget, or use another job.account",
        ),
        (
            "AssocMaxNodePerJobLimit",
            "AssocMaxNodePerJobLimit: a job may not have so many nodes under your account; waiting doesn't help; "
            "ask for less or use another job.qos, job.account or partition: after 'miles-hpc cancel', correct it and "
            "submit again",
        ),
        ("SomethingNew", "SomethingNew: a reason that this version doesn't know; see 'man squeue'"),
    ],
)
def test_sentences(reason: str, sentence: str) -> None:
    assert explain_reason(reason).sentence == sentence


@given(st.text())
def test_any_text_is_taken(reason: str) -> None:
    assert explain_reason(reason).sentence
