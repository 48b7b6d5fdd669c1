"""Every report is accounted for: by tests that exist and are collected, or by a reason why it isn't answered here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.reports.fabric_reports import FABRIC_REPORTS
from tests.reports.job_reports import JOB_REPORTS
from tests.reports.life_reports import LIFE_REPORTS
from tests.reports.peer_reports import PEER_REPORTS

ROOT = Path(__file__).parents[2]
SITE_REPORTS = (*JOB_REPORTS, *FABRIC_REPORTS, *LIFE_REPORTS)
ALL = (*SITE_REPORTS, *PEER_REPORTS)

#: As collected; the numbers between were duplicates or no reports.
SITE_NUMBERS = [
    *("1", "2", "3", "4", "5", "6", "7", "8", "11", "12", "13", "14", "15", "16", "18", "20", "20a", "21", "22", "24"),
    *("26", "29", "30", "31", "32", "33", "34", "35", "36", "37", "38", "39", "41", "42", "44", "45", "46", "47"),
    *("48", "49", "50", "51", "52", "53", "55", "56", "57", "58", "59", "60", "62", "63", "64", "65", "66"),
    *("why-leave-ray", "sglang-weight-sync", "config-pitfalls"),
]
PEER_NUMBERS = [str(number) for number in range(1, 15)]


def references() -> list[tuple[str, str, str, str]]:
    """(report, file, function, case or "") of every test that a report names."""
    found = []
    for report in ALL:
        for reference in report.tests:
            path, _, name = reference.partition("::")
            function, bracket, case = name.partition("[")
            assert not bracket or case.endswith("]"), f"report {report.number}: {reference}"
            found.append((report.number, path, function, case[:-1]))
    return found


def test_every_number_is_there_once() -> None:
    assert [report.number for report in SITE_REPORTS] == SITE_NUMBERS
    assert [report.number for report in PEER_REPORTS] == PEER_NUMBERS


def test_every_report_says_who_and_what_and_is_answered() -> None:
    for report in ALL:
        assert report.source and len(report.fault) > 20, report.number
        assert report.tests or report.not_ours or report.not_yet, f"report {report.number} is not answered"
        assert len(set(report.tests)) == len(report.tests), report.number


def test_every_test_that_is_named_exists_and_runs() -> None:
    """A renamed test, one that pytest doesn't collect, or one that is skipped for good leaves its report unanswered."""
    functions: dict[str, dict[str, ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for number, path, function, _ in references():
        file = ROOT / path
        assert file.name.startswith("test_") and file.is_file(), f"report {number}: no file {path}"
        if path not in functions:
            body = ast.parse(file.read_text()).body
            functions[path] = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function.startswith("test_") and function in functions[path], f"report {number}: no {function} in {path}"
        for decorator in functions[path][function].decorator_list:
            assert ast.unparse(decorator).partition("(")[0] not in ("pytest.mark.skip", "pytest.mark.xfail"), function


def test_every_case_that_is_named_is_collected() -> None:
    named = {(path, f"{path}::{function}[{case}]") for _, path, function, case in references() if case}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted({path for path, _ in named})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    collected = set(done.stdout.splitlines())
    missing = sorted(reference for _, reference in named if reference not in collected)
    assert not missing, f"{missing}\n{done.stderr[-2000:]}"


def test_every_test_of_this_folder_answers_a_report() -> None:
    named = {(path, function) for _, path, function, _ in references()}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        if file == Path(__file__):
            continue
        path = str(file.relative_to(ROOT))
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert (path, node.name) in named, f"no report names {path}::{node.name}"
