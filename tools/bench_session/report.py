"""What a run found: one JSON object, its summary, and tables for people.

| of the summary | is | wanted |
|---|---|---|
| turns_per_s | appended turns that one core does in the session core, at 64k tokens of history | 2000 or more |
| turn_cost_ratio_64k_over_1k | what an appended turn costs at 64k over 1k | 2 or less |
| routing_ratio_ours_over_sglang_router | requests/s, clients and backends the same: our routing in process over theirs as a hop | 1 or more |
| routing_cpu_ratio_ours_over_sglang_router | processor time of client and hop per request, ours over theirs | 1 or less |
| proxy_ratio_ours_over_sglang_router | requests/s, our router as an HTTP proxy over theirs | for information |
| prefix_hit_share_of_bound | `ours` over the trace: prompt tokens found over those that can be | 0.96 or more |
| load_imbalance | `ours` over the trace: the engines' mean active tokens, the largest over the mean | 1.1 or less |

Ratios of routing are medians over repeats, each of arms that ran one after the other. What wasn't measured is null, with its reason in `left_out`.
"""  # noqa: E501

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench_session.core import Arm, core_summary

__all__ = ["Report", "show"]

_PEER_KEYS = (
    "routing_ratio_ours_over_sglang_router",
    "routing_cpu_ratio_ours_over_sglang_router",
    "proxy_ratio_ours_over_sglang_router",
)


@dataclass
class Report:
    """Rows by part; `conditions` grows as parts tell theirs."""

    conditions: dict[str, Any]
    core: list[Arm] = field(default_factory=list)
    surface: list[dict[str, Any]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    live: list[dict[str, Any]] = field(default_factory=list)
    decision_us: list[float] = field(default_factory=list)
    routed: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """See the module's table."""
        found: dict[str, Any] = {**core_summary(self.core), **self._surface(), **self._routing(), **self._trace()}
        return found | {"left_out": self.left_out}

    def as_json(self) -> dict[str, Any]:
        arms = [
            *({"part": "core", **arm.row()} for arm in self.core),
            *({"part": "surface", **row} for row in self.surface),
            *({"part": "trace", **row} for row in self.trace),
            *({"part": "live", **row} for row in self.live),
            *({"part": "routed", **row} for row in self.routed),
            {"part": "decision", "decision_us_all": [round(value, 3) for value in self.decision_us]},
        ]
        return {"conditions": self.conditions, "arms": arms, "summary": self.summary()}

    def _surface(self) -> dict[str, Any]:
        rows = {row["size"]: row for row in self.surface}
        return {
            f"http_{name}_{size}": rows[size][name] for size in rows for name in ("turns_per_core_s", "parse_share")
        }

    def _routing(self) -> dict[str, Any]:
        rows = {row["arm"]: row for row in self.routed}
        found: dict[str, Any] = {"decision_us": round(min(self.decision_us), 2) if self.decision_us else None}
        if "router" not in rows or "gateway" not in rows:
            return found | dict.fromkeys(_PEER_KEYS)
        ours, peer, proxy = rows["gateway"], rows["router"], rows["proxy"]
        ratios = (
            _paired(ours["requests_per_s_all"], peer["requests_per_s_all"]),
            _paired(ours["cpu_us_all"], peer["cpu_us_all"]),
            _paired(proxy["requests_per_s_all"], peer["requests_per_s_all"]),
        )
        return found | dict(zip(_PEER_KEYS, ratios, strict=True))

    def _trace(self) -> dict[str, Any]:
        ours = next(row for row in self.trace if row["policy"] == "ours")
        return {
            "prefix_hit_share_of_bound": ours["hit_share_of_bound"],
            "load_imbalance": ours["load_imbalance"],
            "momentary_imbalance": ours["momentary_imbalance"],
        }


def _paired(ours: list[float], theirs: list[float]) -> float:
    """The median of the repeats' ratios: within a repeat, both arms saw the same machine."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def show(report: Report, console: Console) -> None:
    """Tables, the summary and the conditions."""
    for table in (_core(report.core), _rows("Through HTTP", report.surface, _SURFACE)):
        console.print(table)
    console.print(_rows("A trace of agents over engines (spread: least to most over the traces)", report.trace, _TRACE))
    console.print(_rows("A smaller trace, through the real sglang-router as well", report.live, _TRACE))
    console.print(_rows("Requests through a router, engines that answer at once", report.routed, _ROUTED))
    console.print({"summary": report.summary(), "conditions": report.conditions})


_SURFACE = ("size", "history_tokens", "body_bytes", "clients", "server_cpu_us", "turns_per_core_s", "parse_share")
_TRACE = (
    "policy",
    "hit_share_of_bound",
    "load_imbalance",
    "imbalance_spread",
    "momentary_imbalance",
    "evicted_mtokens",
)
_ROUTED = ("arm", "clients", "prompt_tokens", "requests_per_s", "client_cpu_us", "hop_cpu_us")


def _core(arms: list[Arm]) -> Table:
    table = Table(title="Cost of a turn to the session core: processor time, \u00b5s, median (p10 to p90)")
    for column in ("operation", "history", "tokens", "\u00b5s", "p10 to p90", "wall \u00b5s"):
        table.add_column(column, justify="right" if column in ("tokens", "\u00b5s", "wall \u00b5s") else "left")
    for row in (arm.row() for arm in arms):
        spread = f"{row['cpu_p10_us']:.0f} to {row['cpu_p90_us']:.0f}"
        figures = (f"{row['cpu_median_us']:.0f}", spread, f"{row['wall_median_us']:.0f}")
        table.add_row(row["operation"], row["history"], str(row["history_tokens"]), *figures)
    return table


def _rows(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column.replace("_", " "), justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    return table
