"""How the doctor's findings are shown: a table with the worst first, JSON, one line for a log."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miles_hpc.cluster.nodelist import compress
from miles_hpc.cluster.preflight.catalogue import every_check
from miles_hpc.cluster.preflight.contract import Check, Comparison, Context
from miles_hpc.cluster.preflight.runner import Result, worst
from miles_hpc.core.errors import UserError

__all__ = ["Report", "Row", "print_catalogue", "print_json", "print_table", "print_verdict", "rows_of", "verdict"]

_STATUSES = ("FAIL", "warn", "ok", "skip")
_STYLES = {"FAIL": "bold red", "warn": "yellow", "ok": "green", "skip": "dim"}
#: Of findings that no check makes: whether the nodes that were asked have answered.
_NODES = ("a node that doesn't answer now won't answer a run", "srun's exit code tells nothing of lost nodes")
_NUMBER = re.compile(r"\d[\d.,]*( [kMGTP]?B\b)?")


@dataclass(frozen=True)
class Report:
    """All that one call of the doctor found."""

    versions: list[tuple[str, str]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    context: Context | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table: a finding, and the nodes that agree on it but for numbers."""

    status: str
    check: str
    nodes: tuple[str, ...]  # "" among them: this machine, or what concerns them all
    saw: str
    do: str = ""


def rows_of(results: Iterable[Result]) -> list[Row]:
    """Findings with the worst first, in the order of the results otherwise. Pure.

    Nodes that say the same but for numbers share a row, which has the first one's; what was skipped for one reason
    shares a row too.
    """
    grouped: dict[tuple[str, ...], list[Result]] = {}
    for result in results:
        status, saw = result.finding.status, result.finding.saw
        key = (status, saw) if status == "skip" else (status, result.check, _NUMBER.sub("#", saw))
        grouped.setdefault(key, []).append(result)
    rows = []
    for alike in grouped.values():
        first = alike[0]
        nodes = tuple(dict.fromkeys(result.node for result in alike))
        checks = ", ".join(dict.fromkeys(result.check for result in alike))
        same = len({result.finding.saw for result in alike}) == 1
        whose = "" if same else f" (numbers of {first.node or 'this machine'})"
        rows.append(Row(first.finding.status, checks, nodes, first.finding.saw + whose, first.finding.do))
    return sorted(rows, key=lambda row: _STATUSES.index(row.status))


def verdict(results: Sequence[Result]) -> str:
    """One line: the worst status, how many of each, and which checks fail where."""
    counts = ", ".join(
        f"{number} {status}" for status in _STATUSES if (number := sum(r.finding.status == status for r in results))
    )
    rows = [row for row in rows_of(results) if row.status == "FAIL"]
    failed = dict.fromkeys(f"{row.check} {_at(row.nodes)}".strip() for row in rows)
    return f"{worst(results)}: {counts or 'nothing looked at'}" + (f"; {', '.join(failed)}" if failed else "")


def print_verdict(report: Report) -> None:
    print(f"miles-hpc doctor: {verdict(report.results)}")


def print_json(report: Report) -> None:
    known = every_check()
    findings = []
    for result in report.results:
        why, source = _reasons(known, result.check)
        finding = result.finding
        findings.append(
            {
                "check": result.check,
                "node": result.node,
                "status": finding.status,
                "saw": finding.saw,
                "do": finding.do,
                "why": why,
                "source": source,
            }
        )
    counts = {status: sum(r.finding.status == status for r in report.results) for status in _STATUSES}
    site = report.context.site.name if report.context is not None and report.context.site is not None else ""
    print(
        json.dumps(
            {
                "ok": worst(report.results) != "FAIL",
                "site": site,
                "counts": counts,
                "findings": findings,
                "versions": dict(report.versions),
            },
            indent=2,
        )
    )


def print_table(report: Report) -> None:
    """Versions, then the findings. Wrapped on a terminal; one line per finding elsewhere."""
    width = max((len(name) for name, _ in report.versions), default=0)
    for name, text in report.versions:
        print(f"{name:<{width}}  {text}")
    if not report.results:
        return
    if report.versions:
        print()
    lines = list(_lines(rows_of(report.results)))
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table.grid(padding=(0, 2))
        for style in (None, None, None):
            table.add_column(style=style, overflow="fold")
        table.columns[0].no_wrap = table.columns[1].no_wrap = True
        for status, check, text in lines:
            table.add_row(Text(status, _STYLES.get(status, "")), check, Text(text, "" if status else "dim"))
        console.print(table)
    else:
        names = max(len(check) for _, check, _ in lines)
        for status, check, text in lines:
            print(f"{status:<4}  {check:<{names}}  {text}".rstrip())
    print(f"\n{verdict(report.results)}")
    sys.stdout.flush()


def _lines(rows: Iterable[Row]) -> Iterable[tuple[str, str, str]]:
    """Status, check, text; below a finding that isn't fine, lines without status say what to do, and why."""
    known = every_check()
    for row in rows:
        if row.status == "skip":
            yield row.status, "", f"{row.check}: {row.saw}"
            continue
        yield row.status, row.check, f"{_at(row.nodes)}: {row.saw}".removeprefix(": ")
        if row.do:
            why, source = _reasons(known, row.check)
            yield "", "", f"do:  {row.do}"
            yield "", "", f"why: {why} ({source})"


def _at(nodes: tuple[str, ...]) -> str:
    """ "", "trainer[1-2]" or "here, trainer[1-2]"."""
    names = sorted(node for node in nodes if node)
    if not names:
        return ""
    try:
        text = compress(names)
    except UserError:  # names that no host list holds
        text = ",".join(names)
    return f"here, {text}" if "" in nodes else text


def _reasons(known: dict[str, Check | Comparison], name: str) -> tuple[str, str]:
    return (known[name].why, known[name].source) if name in known else _NODES


def print_catalogue(checks: Sequence[Check | Comparison]) -> None:
    """Every check with its needs, reason and source."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        kind = "nodes compared" if isinstance(check, Comparison) else "each machine" if not check.once else "once"
        needs = f"; needs {', '.join(check.needs)}" if check.needs else ""
        print(f"{check.name:<{width}}  {check.why}\n{'':<{width}}  {kind}{needs}; source: {check.source}")
