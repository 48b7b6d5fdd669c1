"""Garbage against the control layer, and what must not come of it.

    python -m tools.fuzz_control [--frames 1000000] [--seed 0] [--kinds tcp] [--json]

Each kind of transport listens in a process of its own, once per face; `--frames` is the number of mutated frames for
all of them together. The parts that need no connection get half as many again, in this process.

| stage | who attacks | what must hold |
|---|---|---|
| strangers | who can connect | no handler runs, at most the challenge leaves, few connections stay half open |
| tampering | who is on the path of an honest client | nothing from the first changed byte on is handled |
| broken peer | a peer with the secret and a bug | oddities are borne; the forbidden ends that endpoint, with a reason |
| in process | the same against single parts | as above, and exactly the good frames in front are delivered |

All the while a good client is answered, on an endpoint that lives through it all and on fresh ones, and afterwards the
target has as many descriptors, tasks, endpoints and objects as before. Exit code 1 when any of this was violated.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import resource
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from miles_hpc.control.auth import new_secret
from miles_hpc.control.greeting import LOG_INTERVAL_S, MAX_HALF_OPEN, MAX_LOGGED_REFUSALS
from miles_hpc.control.opening import open_carrier
from tools.fuzz_control.broken_peer import misbehave
from tools.fuzz_control.impostor import fuzz_dialers
from tools.fuzz_control.in_process import fuzz_conversations, fuzz_handshakes, fuzz_seals, fuzz_wires
from tools.fuzz_control.strangers import besiege, knock, knock_at_ucx
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.tampering import tamper, tamper_over_ucx
from tools.fuzz_control.watch import GoodClient, TargetProcess

#: Parts of a target's frames. A stranger's or a tampered frame costs a connection, a broken peer's doesn't.
_SHARES = {"strangers": 0.15, "tampering": 0.05, "broken peer": 0.80}
_IN_PROCESS = {"wires": 0.10, "seals": 0.40, "handshakes": 0.12, "dialers": 0.03, "conversations": 0.35}
_MAX_PEAK_BYTES = 512 << 20
_MAX_KEPT_BYTES = 24 << 20


def _attack(kind: str, face: str, frames: int, seed: int) -> tuple[list[Tally], dict[str, Any]]:
    """All stages against one target, and what became of it."""
    where = f"{kind}, {face}"
    secret = new_secret()
    stages = {name: Tally(name, where) for name in _SHARES}
    verdict = Tally("watch", where)
    reasons: dict[str, set[str]] = {}
    carrier = open_carrier(kind)
    start = time.monotonic()
    with TargetProcess(kind, face, secret) as target:
        good = GoodClient(kind, target.address, secret)
        good.start()
        over = threading.Event()
        sampler = threading.Thread(target=_sample, args=(target, over))
        sampler.start()
        rng = Random(f"{seed} {where}")

        def tampering(n: int, tally: Tally) -> None:
            if kind == "ucx":
                tamper_over_ucx(rng, carrier, target.address, secret, n, tally)
            else:
                tamper(rng, target.address, secret, n, tally)

        try:
            warm = {name: Tally(name, where) for name in _SHARES}
            knock(rng, target.address, secret, 200, warm["strangers"])
            tampering(100, warm["tampering"])
            misbehave(rng, carrier, target.address, secret, 3000, warm["broken peer"], reasons)
            before = target.settled()
            target.most.clear()
            besiege(
                target.address, secret, stages["strangers"], lambda: target.ask()["half_open"], limit=_half_open_limit()
            )
            knock(rng, target.address, secret, int(_SHARES["strangers"] * frames), stages["strangers"])
            if kind == "ucx":
                knock_at_ucx(rng, target.pid, target.address, min(2000, frames // 20), stages["strangers"])
            tampering(int(_SHARES["tampering"] * frames), stages["tampering"])
            rest = int(_SHARES["broken peer"] * frames)
            misbehave(rng, carrier, target.address, secret, rest, stages["broken peer"], reasons)
            sent = stages["tampering"].counts + warm["tampering"].counts
            honest = range(sent["honest frames"], sent["honest frames"] + sent["honest frames, overtaken perhaps"] + 1)
            after = target.settled()
        except (RuntimeError, OSError) as error:
            verdict.violated(f"{type(error).__name__}: {error}")
            before = after = {}
            honest = range(0)
        finally:
            over.set()
            sampler.join()
            good.stop()
    verdict.duration_s = time.monotonic() - start
    tallies = [*stages.values(), verdict]
    for name, tally in warm.items():
        stages[name].violations += tally.violations
        stages[name].n_violations += tally.n_violations
    if after:
        _judge(verdict, before, after, target.most, good, honest)
        overrun = reasons.get("more than the window")
        if face == "asyncio" and overrun and not any("window" in text for text in overrun):
            verdict.violated("nobody was told that it sent more than the window")
    return tallies, {
        "kind": kind,
        "face": face,
        "before": before,
        "after": after,
        "most": target.most,
        "lines_of_libraries": target.stray_lines,
        "good_calls": good.calls,
        "good_joins": good.joins,
        "good_latency_s": _spread(good.latencies_s),
        "good_join_s": _spread(good.joins_s),
        "reasons": {name: sorted(texts) for name, texts in sorted(reasons.items())},
    }


def _half_open_limit() -> int:
    return min(MAX_HALF_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def _sample(target: TargetProcess, over: threading.Event) -> None:
    while not over.wait(0.25):
        try:
            target.ask()
        except RuntimeError:
            return


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    return {"median": ordered[len(ordered) // 2], "max": ordered[-1]}


def _judge(
    verdict: Tally, before: dict[str, Any], after: dict[str, Any], most: dict[str, int], good: GoodClient, honest: range
) -> None:
    handled = after["handled"]
    forged = {who: n for who, n in handled.items() if who.endswith(":forged") and not who.startswith("broken:")}
    if forged:
        verdict.violated(f"handlers ran from forged frames: {forged}")
    if any(who.startswith("stranger") for who in handled):
        verdict.violated(f"a handler ran for a stranger: {handled}")
    if handled.get("honest:honest", 0) not in honest or after["out_of_order"]:
        verdict.violated(
            f"{honest.start} honest frames were sent before tampered ones, {handled.get('honest:honest', 0)} handled, "
            f"{after['out_of_order']} out of order"
        )
    for failure in good.failures:
        verdict.violated(f"the good client: {failure}")
    if len(good.latencies_s) + good.joins != good.calls:
        verdict.violated(f"the good client made {good.calls} calls, {len(good.latencies_s) + good.joins} were answered")
    for name in ("descriptors", "tasks", "half_open", "objects"):
        # The good client may be joining in this very moment; a cycle of a few objects isn't a leak.
        slack = {"objects": 20, "descriptors": 2, "tasks": 3}.get(name, 0)
        if after[name] > before[name] + slack:
            verdict.violated(f"{name}: {before[name]} before, {after[name]} after")
    if after["rss_bytes"] > before["rss_bytes"] + _MAX_KEPT_BYTES:
        verdict.violated(f"memory: {before['rss_bytes'] >> 20} MiB before, {after['rss_bytes'] >> 20} MiB after")
    if most["rss_bytes"] > before["rss_bytes"] + _MAX_PEAK_BYTES:
        verdict.violated(f"memory: {most['rss_bytes'] >> 20} MiB at its peak")
    if after["log_leaks"]:
        verdict.violated("the secret is in the log")
    refusals = after["log_lines"].get("miles_hpc.control.greeting:WARNING", 0)
    if refusals > (1 + verdict.duration_s // LOG_INTERVAL_S) * (MAX_LOGGED_REFUSALS + 1):
        verdict.violated(f"{refusals} lines in the log about strangers in {verdict.duration_s:.0f} s")
    errors = {name: n for name, n in after["log_lines"].items() if name.endswith(":ERROR")}
    if errors.keys() - {"miles_hpc.control.asyncio_face:ERROR", "miles_hpc.control.blocking_face:ERROR"}:
        verdict.violated(f"errors in the log: {errors}")


def _alone(frames: int, seed: int) -> list[Tally]:
    tallies = {name: Tally(name, "in process") for name in _IN_PROCESS}
    rng = Random(seed)
    share = {name: int(part * frames) for name, part in _IN_PROCESS.items()}
    fuzz_wires(rng, share["wires"], tallies["wires"])
    fuzz_seals(rng, share["seals"], tallies["seals"])
    fuzz_handshakes(rng, share["handshakes"], new_secret(), tallies["handshakes"])
    fuzz_dialers(rng, share["dialers"], new_secret(), tallies["dialers"])
    fuzz_conversations(rng, share["conversations"], tallies["conversations"])
    return list(tallies.values())


def _print(console: Console, tallies: list[Tally], targets: list[dict[str, Any]], conditions: dict[str, Any]) -> None:
    stages = Table(title="mutated frames")
    for name in ("stage", "against", "frames", "connections", "frames/s", "borne by contract", "violations"):
        stages.add_column(name, justify="left" if name in ("stage", "against") else "right")
    for tally in tallies:
        if tally.frames:
            rate = f"{tally.frames / tally.duration_s:,.0f}" if tally.duration_s else ""
            row = (f"{tally.frames:,}", f"{tally.connections:,}" if tally.connections else "", rate)
            borne = f"{tally.counts['borne']:,}" if tally.counts["borne"] else ""
            stages.add_row(tally.stage, tally.where, *row, borne, str(tally.n_violations))
    console.print(stages)
    table = Table(title="targets: before, at most, after")
    for name in ("target", "memory, MiB", "descriptors", "tasks", "half-open", "endpoints", "objects", "log lines"):
        table.add_column(name, justify="left" if name == "target" else "right")
    table.add_column("good client: calls, joins, slowest")
    for found in targets:
        before, most, after = found["before"], found["most"], found["after"]
        if not after:
            table.add_row(f"{found['kind']}, {found['face']}", "ended")
            continue
        cells = [f"{before['rss_bytes'] >> 20}, {most['rss_bytes'] >> 20}, {after['rss_bytes'] >> 20}"]
        cells += [f"{before[n]}, {most[n]}, {after[n]}" for n in ("descriptors", "tasks", "half_open", "endpoints")]
        cells += [f"{before['objects']}, {after['objects']}", f"{sum(after['log_lines'].values()):,}"]
        slowest = f"{found['good_latency_s']['max']:.2f} s, {found['good_join_s']['max']:.2f} s"
        cells.append(f"{found['good_calls']:,}, {found['good_joins']:,}, {slowest}")
        table.add_row(f"{found['kind']}, {found['face']}", *cells)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in conditions.items()))


def main(argv: list[str] | None = None) -> int:
    """Run all stages; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_control", description="Fuzz the control layer.")
    parser.add_argument("--frames", type=int, default=1_000_000, help="against listening endpoints (default: 10^6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="tcp", help="transports, separated by commas (default: tcp)")
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of tables")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)  # of the parts in this process; the target counts its own lines
    start = time.monotonic()
    kinds = args.kinds.split(",")
    tallies: list[Tally] = []
    targets: list[dict[str, Any]] = []
    for kind in kinds:
        for face in ("asyncio", "blocking"):
            found, target = _attack(kind, face, args.frames // (2 * len(kinds)), args.seed)
            tallies += found
            targets.append(target)
    tallies += _alone(args.frames // 2, args.seed)
    conditions = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": Path("/proc/loadavg").read_text().split()[0],
        "seed": args.seed,
        "seconds": round(time.monotonic() - start),
    }
    violations = [text for tally in tallies for text in tally.violations]
    if args.json:
        stages = [
            {
                "stage": t.stage,
                "where": t.where,
                "frames": t.frames,
                "connections": t.connections,
                "duration_s": t.duration_s,
                "counts": dict(t.counts),
            }
            for t in tallies
        ]
        print(json.dumps({"conditions": conditions, "stages": stages, "targets": targets, "violations": violations}))
    else:
        _print(Console(width=150), tallies, targets, conditions)
        for text in violations:
            print(f"VIOLATED {text}", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
