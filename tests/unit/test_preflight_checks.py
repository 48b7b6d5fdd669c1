"""Every check of the doctor on machines that are fine and on machines that aren't."""

from __future__ import annotations

import pytest

from miles_hpc.cluster.preflight.catalogue import every_check, select
from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, fail, fine, warn
from miles_hpc.cluster.preflight.runner import compare_nodes, run_checks, worst
from miles_hpc.core.errors import UserError
from tests.fakes.fake_machine import FakeMachine
from tests.unit.preflight_cases import CASES, RUN_DIR, Case
from tests.unit.preflight_compared import COMPARED, Compared


def told(findings: list[Finding]) -> str:
    return "\n".join(f"{finding.status}: {finding.saw}" for finding in findings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}-{case.status}-{case.saw[:30]}")
def test_a_check_says_what_it_sees(case: Case) -> None:
    check = every_check()[case.check]
    assert isinstance(check, Check)
    findings = list(check.look(case.machine, case.context))
    graver = {"FAIL": (), "warn": ("FAIL",), "ok": ("FAIL", "warn"), "skip": ("FAIL", "warn", "ok")}[case.status]
    assert not [finding for finding in findings if finding.status in graver], told(findings)
    assert [f for f in findings if f.status == case.status and case.saw in f.saw], told(findings)


@pytest.mark.parametrize("case", COMPARED, ids=lambda case: f"{case.comparison}-{case.status}-{case.saw[:30]}")
def test_a_comparison_says_what_differs(case: Compared) -> None:
    one = every_check()[case.comparison]
    context = Context(site=case.site, compute=True, run_dir=RUN_DIR, environ=case.environ)
    facts = {node: {case.comparison: value} for node, value in case.values.items()}
    results = compare_nodes([one], facts, context)
    assert worst(results) == case.status, told([result.finding for result in results])
    findings = [result.finding for result in results]
    assert [f for f in findings if f.status == case.status and case.saw in f.saw], told(findings)


def test_every_check_is_seen_to_pass_and_to_complain() -> None:
    seen: dict[str, set[str]] = {name: set() for name in every_check()}
    for case in CASES:
        seen[case.check].add(case.status)
    for compared in COMPARED:
        seen[compared.comparison].add(compared.status)
    assert {name for name, statuses in seen.items() if "ok" not in statuses} == set()
    assert {name for name, statuses in seen.items() if not statuses & {"warn", "FAIL"}} == set()


def test_checks_tell_why_they_are_there() -> None:
    for check in every_check().values():
        assert len(check.why) > 20, check.name
        assert check.source, check.name


def test_a_finding_that_is_not_fine_says_what_to_do() -> None:
    assert fine("good").ok
    assert warn("odd", "look").ok
    assert not fail("bad", "repair").ok
    with pytest.raises(ValueError, match="says what to do: bad"):
        Finding("FAIL", "bad")


def test_checks_are_chosen_by_name() -> None:
    assert [check.name for check in select(["flock,ports", "quota"])] == ["ports", "flock", "quota"]
    assert len(select()) == len(every_check())
    with pytest.raises(UserError, match="no check of that name: did you mean 'flock'"):
        select(["flok"])


def test_what_is_needed_and_missing_is_named() -> None:
    nothing = Context()
    results = run_checks(select(["mpi,flock,limits,imex"]), CASES[0].machine, nothing)
    assert [(r.check, r.finding.status, r.finding.saw) for r in results] == [
        ("mpi", "skip", "needs --site"),
        ("imex", "skip", "needs --site"),
        ("limits", "skip", "for machines that run roles: --on-nodes N, or a --site without Slurm"),
        ("flock", "skip", "needs --run-dir or --run"),
    ]


def test_memory_is_what_the_kernel_calls_available() -> None:
    one = every_check()["host-memory"]
    assert isinstance(one, Comparison)
    text = "MemTotal:       900000000 kB\nMemFree:  1 kB\nMemAvailable:   755859375 kB\n"
    assert one.gather(FakeMachine(files={"/proc/meminfo": text}), Context()) == 774 * 10**9
    assert one.gather(FakeMachine(), Context()) is None


def test_a_comparison_needs_two_nodes_and_names_the_silent_one() -> None:
    clock = every_check()["clock"]
    assert isinstance(clock, Comparison)
    context = Context(compute=True)
    (alone,) = compare_nodes([clock], {"n1": {"clock": 0.0}}, context)
    assert (alone.finding.status, alone.finding.saw) == ("skip", "needs two nodes or more: --on-nodes N")
    facts = {"n1": {"clock": 0.0}, "n2": {"clock": 0.0}, "n3": {"clock": None}}
    results = compare_nodes([clock], facts, context)
    assert [r.finding.saw for r in results if r.finding.status == "warn"] == ["n3 told nothing, unlike 2 others"]
