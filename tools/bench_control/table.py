"""The run for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench_control.run import Report
from tools.bench_control.spread import ArmResult, Measured

__all__ = ["show"]

_SIZES = ("1 KiB", "64 KiB", "8 MiB")


def show(report: Report, console: Console) -> None:
    """Print tables of calls, bulk transfers, many peers and start-up, and the summary."""
    arms = report.arms
    libraries = {name: arm for name, arm in arms.items() if not name.startswith("start-")}
    if libraries:
        console.print(_calls(libraries))
        console.print(_bulk(libraries))
        console.print(_many(libraries))
    if len(libraries) < len(arms):
        console.print(_startup(arms))
    for name, arm in arms.items():
        for stage, reason in arm.errors.items():
            console.print(f"{name}, {stage}: {reason}", style="yellow", highlight=False)
    console.print(_summary(report.summary))
    known = report.conditions
    console.print(
        f"{known['cpu']}, {known['cores']} cores, load {known['load_average_at_start']} to "
        f"{known['load_average_at_end']}, Linux {known['kernel']}, Python {known['python']}, "
        f"{known['repeats_done']} repeats in {known['seconds']} s, seed {known['seed']}; "
        "medians of repeats, free | apart (caller and peer on cores of their own)",
        highlight=False,
    )


def _both(arm: ArmResult, cell: str, text: Any) -> str:
    """A figure in both placements."""
    found = [arm.cells.get(name) for name in (cell, f"{cell}, apart")]
    if found == [None, None]:
        return "-"
    return " | ".join("-" if one is None else text(one) for one in found)


def _us(one: Measured) -> str:
    return f"{one.p50_s * 1e6:,.0f}" if one.p50_s >= 1e-4 else f"{one.p50_s * 1e6:.1f}"


def _calls(arms: Mapping[str, ArmResult]) -> Table:
    table = Table(title="Calls to one peer: p50 in us; calls per second with 64 in flight")
    for column in ("arm", "call", "p99", *(f"{size} {way}" for size in _SIZES[:2] for way in ("arg", "result")), "64"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in arms.items():
        sizes = [_both(arm, f"{size} {way}", _us) for size in _SIZES[:2] for way in ("argument", "result")]
        p99 = _both(arm, "call", lambda one: f"{one.p99_s * 1e6:,.0f}")
        batch = _both(arm, "batch of 64", lambda one: f"{one.calls_per_s:,.0f}")
        table.add_row(name, _both(arm, "call", _us), p99, *sizes, batch)
    return table


def _bulk(arms: Mapping[str, ArmResult]) -> Table:
    table = Table(title="8 MiB: GB/s (1e9 bytes)")
    ways = ("argument", "argument x4", "result", "result x4")
    for column in ("arm", *ways):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in arms.items():
        table.add_row(name, *(_both(arm, f"8 MiB {way}", lambda one: f"{one.gb_per_s or 0:.2f}") for way in ways))
    return table


def _many(arms: Mapping[str, ArmResult]) -> Table:
    table = Table(title="Many peers: us per round; calls per second")
    cells = ("round of 8", "8 peers x8", "round of 64")
    for column in ("arm", *(f"{cell}{unit}" for cell in cells for unit in (", us", ", calls/s"))):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, arm in arms.items():
        row: list[str] = []
        for cell in cells:
            one = arm.cells.get(cell)
            row += ["-", "-"] if one is None else [_us(one), f"{one.calls_per_s:,.0f}"]
        table.add_row(name, *row)
    return table


def _startup(arms: Mapping[str, ArmResult]) -> Table:
    table = Table(title="Start-up: seconds, median (each)")
    for column in ("arm", "workers", "s", "what"):
        table.add_column(column, justify="left" if column in ("arm", "what") else "right")
    for name, arm in arms.items():
        for one in arm.cells.values() if name.startswith("start-") else ():
            each = ", ".join(f"{seconds:.2f}" for seconds in one.p50_s_of_repeats)
            table.add_row(name, str(one.peers), f"{one.p50_s:.2f} ({each})", arm.about)
    return table


def _summary(summary: Mapping[str, Any]) -> Table:
    table = Table(title=f"Ours ({summary['ours_transport'] or 'not measured'}, {summary['ours_face']} face)")
    for column in ("figure", "value", "goal"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for key, value in summary.items():
        if isinstance(value, dict):
            continue
        goal = summary["goals"].get(key)
        met = "" if goal is None or goal["met"] is None else (" yes" if goal["met"] else " NO")
        shown = "not measured" if value is None else f"{value:,.3g}" if isinstance(value, float) else str(value)
        table.add_row(key, shown, "" if goal is None else goal["bound"] + met)
    return table
