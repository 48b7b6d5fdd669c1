"""The summary: what the run says about ours against its peers. Pure; what wasn't measured is None.

An arm counts with the better of its two placements, a bulk transfer also with the better of one and four in flight, and
of argument and result the worse ratio counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.bench_control.plan import GOALS
from tools.bench_control.spread import ArmResult, Measured

__all__ = ["TRANSPORTS", "summarise"]

TRANSPORTS = ("tcp", "tcp-only", "ucx", "mpi")
_DIRECTIONS = ("argument", "result")
#: The library that a transport of ours is held against: Unix sockets with Unix sockets, TCP with TCP.
_RAW = {
    "tcp": ("zmq_ipc", "zmq-ipc"),
    "tcp-only": ("zmq", "zmq-tcp"),
    "ucx": ("ucx", "ucx-raw"),
    "mpi": ("mpi", "mpi-raw"),
}


def summarise(arms: Mapping[str, ArmResult]) -> dict[str, Any]:
    """`ours` is one transport for all figures with Ray: of tcp and ucx, blocking face, the one with the lower p50."""
    per_transport = {transport: _against_ray(arms, _ours(arms, transport)) for transport in TRANSPORTS}
    measured = {t: v["p50_us"] for t, v in per_transport.items() if t != "mpi" and v["p50_us"] is not None}
    chosen = min(measured, key=lambda transport: measured[transport], default=None)
    ours = per_transport[chosen] if chosen else _against_ray(arms, ())
    ray_p50, ray_placement = _p50(arms, ("ray",))
    width = max((m.peers for m in _starts(arms, "start-ours-tcp") if _starts(arms, "start-srun", m.peers)), default=0)
    srun, start = _seconds(arms, "start-srun", width), _seconds(arms, "start-ours-tcp", width)
    summary: dict[str, Any] = {
        "ours_transport": chosen,
        "ours_face": "blocking",
        "p50_us_ours": ours["p50_us"],
        "p50_arm_ours": ours["p50_arm"],
        "p50_us_ray": ray_p50,
        "p50_placement_ray": ray_placement,
        "p50_ratio_ray_over_ours": ours["p50_ratio_ray_over_ours"],
        "calls_per_s_ours": ours["calls_per_s"],
        "calls_per_s_ray": _calls(arms, ("ray",)),
        "calls_ratio_ours_over_ray": ours["calls_ratio_ours_over_ray"],
        "bulk_8mib_ratio_ours_over_ray": ours["bulk_8mib_ratio_ours_over_ray"],
        "bulk_8mib_gb_per_s": {
            name: {direction: _bulk(arms, names, direction) for direction in _DIRECTIONS}
            for name, names in _bulk_names(arms).items()
        },
    }
    for transport, (key, raw) in _RAW.items():
        summary[f"bulk_8mib_ratio_ours_over_{key}"] = _worse_bulk_ratio(arms, _ours(arms, transport), (raw,))
    summary |= {
        "startup_workers": width or None,
        "startup_s_srun": srun,
        "startup_s_python": _seconds(arms, "start-python", width),
        "startup_s_ours": start,
        "startup_s_ray": _seconds(arms, "start-ray", width),
        "startup_s_ours_minus_srun": None if srun is None or start is None else start - srun,
        "startup_s_by_workers": {
            name: {str(one.peers): one.p50_s for one in _starts(arms, name)}
            for name in arms
            if name.startswith("start-")
        },
        "by_transport": per_transport,
    }
    summary["goals"] = {
        goal.key: {
            "bound": f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}",
            "met": goal.met(summary[goal.key]),
        }
        for goal in GOALS
    }
    return summary


def _ours(arms: Mapping[str, ArmResult], transport: str) -> tuple[str, ...]:
    """The blocking arms of a transport: with the default wait, and sleeping at once."""
    return tuple(name for name in (f"ours-{transport}-blocking", f"ours-{transport}-nospin") if name in arms)


def _against_ray(arms: Mapping[str, ArmResult], names: tuple[str, ...]) -> dict[str, Any]:
    p50, where = _p50(arms, names)
    calls = _calls(arms, names)
    return {
        "p50_us": p50,
        "p50_arm": where,
        "p50_ratio_ray_over_ours": _ratio(_p50(arms, ("ray",))[0], p50),
        "calls_per_s": calls,
        "calls_ratio_ours_over_ray": _ratio(calls, _calls(arms, ("ray",))),
        "bulk_8mib_ratio_ours_over_ray": _worse_bulk_ratio(arms, names, ("ray",)),
    }


def _placements(arms: Mapping[str, ArmResult], names: tuple[str, ...], cell: str) -> dict[str, Measured]:
    """What these arms measured for a cell: "arm, placement" -> figures."""
    return {
        f"{name}, {measured.placement}": measured
        for name in names
        if name in arms
        for key in (cell, f"{cell}, apart")
        if (measured := arms[name].cells.get(key)) is not None
    }


def _p50(arms: Mapping[str, ArmResult], names: tuple[str, ...]) -> tuple[float | None, str | None]:
    """Microseconds of a call without payload in the best placement, and which arm and placement that is."""
    found = _placements(arms, names, "call")
    if not found:
        return None, None
    best = min(found, key=lambda key: found[key].p50_s)
    return found[best].p50_s * 1e6, best


def _calls(arms: Mapping[str, ArmResult], names: tuple[str, ...]) -> float | None:
    found = _placements(arms, names, "batch of 64")
    return max((measured.calls_per_s for measured in found.values()), default=None)


def _bulk(arms: Mapping[str, ArmResult], names: tuple[str, ...], direction: str) -> float | None:
    rates = [
        measured.gb_per_s
        for cell in (f"8 MiB {direction}", f"8 MiB {direction} x4")
        for measured in _placements(arms, names, cell).values()
        if measured.gb_per_s is not None
    ]
    return max(rates, default=None)


def _bulk_names(arms: Mapping[str, ArmResult]) -> dict[str, tuple[str, ...]]:
    names = {f"ours-{transport}": _ours(arms, transport) for transport in TRANSPORTS}
    return names | {name: (name,) for name in ("ray", "zmq-tcp", "zmq-ipc", "ucx-raw", "mpi-raw")}


def _worse_bulk_ratio(arms: Mapping[str, ArmResult], ours: tuple[str, ...], theirs: tuple[str, ...]) -> float | None:
    ratios = [_ratio(_bulk(arms, ours, direction), _bulk(arms, theirs, direction)) for direction in _DIRECTIONS]
    known = [ratio for ratio in ratios if ratio is not None]
    return min(known) if len(known) == len(ratios) else None


def _starts(arms: Mapping[str, ArmResult], name: str, width: int | None = None) -> list[Measured]:
    """What a start-up arm measured, of one width if given."""
    cells = arms[name].cells.values() if name in arms else ()
    return [measured for measured in cells if width in (None, measured.peers)]


def _seconds(arms: Mapping[str, ArmResult], name: str, width: int) -> float | None:
    found = _starts(arms, name, width)
    return found[0].p50_s if found else None


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
