"""Running checks side by side, under one deadline. What hangs or breaks becomes a finding."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, Machine, fail, skip, warn

__all__ = ["Result", "compare_nodes", "gather_facts", "run_checks", "worst"]

_WORKERS = 8
_ORDER = {"FAIL": 0, "warn": 1, "ok": 2, "skip": 3}


@dataclass(frozen=True)
class Result:
    """A finding of one check about one machine; `node` is "" for what concerns the cluster or several nodes."""

    check: str
    finding: Finding
    node: str = ""


def worst(results: Iterable[Result]) -> str:
    """The gravest status among results; "ok" when there is none."""
    return min((result.finding.status for result in results), key=_ORDER.__getitem__, default="ok")


def run_checks(
    checks: Sequence[Check | Comparison],
    machine: Machine,
    context: Context,
    *,
    node: str = "",
    deadline_s: float = 60.0,
) -> list[Result]:
    """Results in the order of `checks`; comparisons are left to `compare_nodes`. Blocks up to `deadline_s`.

    A check that isn't done by then fails; its thread is left behind (a daemon).
    """
    mine = [check for check in checks if isinstance(check, Check)]
    found = _side_by_side({check.name: _looking(check, machine, context) for check in mine}, deadline_s)
    results = []
    for check in mine:
        late = [fail(f"no result within {deadline_s:.0f} s", "look at this machine by hand: something in it hangs")]
        results += [Result(check.name, finding, node) for finding in found.get(check.name, late)]
    return results


def _looking(check: Check, machine: Machine, context: Context) -> Callable[[], list[Finding]]:
    def look() -> list[Finding]:
        if clause := context.missing(check.needs):
            return [skip(clause)]
        try:
            return list(check.look(machine, context))
        except Exception as error:  # a check that breaks must not hide the others' findings
            return [warn(f"the check itself broke: {type(error).__name__}: {error}", "please report this line")]

    return look


def gather_facts(
    checks: Sequence[Check | Comparison], machine: Machine, context: Context, *, deadline_s: float = 60.0
) -> dict[str, Any]:
    """What this node contributes to each comparison, by name; None where there is nothing, or it broke."""

    def gathering(comparison: Comparison) -> Callable[[], Any]:
        def gather() -> Any:
            if context.missing(comparison.needs):
                return None
            try:
                return comparison.gather(machine, context)
            except Exception:  # told as a node that has nothing to compare
                return None

        return gather

    mine = {one.name: gathering(one) for one in checks if isinstance(one, Comparison)}
    found = _side_by_side(mine, deadline_s)
    return {name: found.get(name) for name in mine}


def compare_nodes(
    checks: Sequence[Check | Comparison], facts: Mapping[str, Mapping[str, Any]], context: Context
) -> list[Result]:
    """Comparisons over the facts of each node, `facts[node][comparison]`. Pure, as far as the comparisons are."""
    results = []
    for one in checks:
        if not isinstance(one, Comparison):
            continue
        beside = [need for need in one.needs if need not in ("compute", "job")]
        if clause := context.missing(beside):
            results.append(Result(one.name, skip(clause)))
            continue
        told = {node: values[one.name] for node, values in facts.items() if values.get(one.name) is not None}
        silent = sorted(set(facts) - set(told))
        if len(told) < 2:
            clause = "needs two nodes or more: --on-nodes N" if len(facts) < 2 else "nothing to compare on these nodes"
            results.append(Result(one.name, skip(clause)))
            continue
        results += [Result(one.name, finding) for finding in one.compare(told, context)]
        if silent:
            saw = f"{', '.join(silent)} told nothing, unlike {len(told)} others"
            results.append(Result(one.name, warn(saw, "look at these nodes by hand")))
    return results


def _side_by_side(work: Mapping[str, Callable[[], Any]], deadline_s: float) -> dict[str, Any]:
    """Results of what ended in time. Daemon threads: one that hangs must not keep the process from ending."""
    todo: queue.SimpleQueue[tuple[str, Callable[[], Any]]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    for item in work.items():
        todo.put(item)

    def worker() -> None:
        while True:
            try:
                name, call = todo.get_nowait()
            except queue.Empty:
                return
            done.put((name, call()))

    for _ in range(min(_WORKERS, len(work))):
        threading.Thread(target=worker, name="check", daemon=True).start()
    end = time.monotonic() + deadline_s
    found: dict[str, Any] = {}
    while len(found) < len(work):
        try:
            name, result = done.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[name] = result
    return found
