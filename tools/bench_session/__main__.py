"""Benchmark of the session core, its HTTP surface and its routing.

    python -m tools.bench_session [--quick] [--json] [--repeats N] [--folder MODEL[:FAMILY]] [--trace FILE]
        [--no-peer | --install-peer]

--install-peer makes sglang-router's environment in a cache folder first (peer.py); without it the peer takes part when
that environment is there, and the summary says so when it isn't.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.rollout.session.template import CHAT_FAMILIES
from tools.bench_session import peer
from tools.bench_session.conditions import machine
from tools.bench_session.core import SAMPLED_TOKENS, SIZES, TURNS_PER_REPEAT, Bench, measure_core
from tools.bench_session.played import measure_live, measure_trace
from tools.bench_session.report import Report, show
from tools.bench_session.routed import decision_us, measure_routed
from tools.bench_session.surface import measure_surface
from tools.bench_session.trace import read
from tools.fuzz_session.templates import folder_template, style_folder


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    core_repeats: int
    surface_clients: int
    surface_turns: int
    surface_repeats: int
    engines: int
    open_sessions: int
    sessions: int
    traces: int
    cache_tokens: int  # of one engine
    live_sessions: int
    backends: int
    clients: int
    requests: int
    prompt_tokens: int
    routed_repeats: int
    decisions: int


FULL = Sizes(
    core_repeats=30,
    surface_clients=4,
    surface_turns=6,
    surface_repeats=7,
    engines=8,
    open_sessions=256,
    sessions=4000,
    traces=3,
    live_sessions=240,
    cache_tokens=400_000,
    backends=8,
    clients=32,
    requests=60,
    prompt_tokens=2000,
    routed_repeats=9,
    decisions=100_000,
)
QUICK = Sizes(
    core_repeats=5,
    surface_clients=2,
    surface_turns=4,
    surface_repeats=3,
    engines=4,
    open_sessions=128,
    sessions=1000,
    traces=1,
    live_sessions=40,
    cache_tokens=400_000,
    backends=4,
    clients=16,
    requests=20,
    prompt_tokens=2000,
    routed_repeats=5,
    decisions=20_000,
)
#: For tests: every part runs, no figure means anything.
SMALLEST = Sizes(
    core_repeats=1,
    surface_clients=1,
    surface_turns=1,
    surface_repeats=1,
    engines=2,
    open_sessions=16,
    sessions=80,
    traces=1,
    live_sessions=8,
    cache_tokens=200_000,
    backends=2,
    clients=2,
    requests=2,
    prompt_tokens=20,
    routed_repeats=1,
    decisions=100,
)


def measure(sizes: Sizes, options: argparse.Namespace) -> Report:
    """All parts, one after the other. Raises MilesError or RuntimeError when a part can't be measured."""
    python, reason = _peer(options)
    traces = None if options.trace is None else [read(options.trace)]
    report = Report(machine() | {"sizes": dict(vars(sizes)), "mode": options.mode, "seed": options.seed})
    with tempfile.TemporaryDirectory() as temporary:
        folder, family = Path(temporary), CHAT_FAMILIES["default"]
        if options.folder:
            path, _, name = options.folder.partition(":")
            if (name or "default") not in CHAT_FAMILIES:
                raise UserError(f"--folder: chat family '{name}': expected one of {', '.join(CHAT_FAMILIES)}")
            model, family = Path(path), CHAT_FAMILIES[name or "default"]
            report.conditions["tokenizer"] = options.folder
        else:
            model, family = style_folder("chatml", folder / "model")
            report.conditions["tokenizer"] = "byte-level BPE of 480 tokens, ChatML with tools"
        bench = Bench(*folder_template(model, family), options.seed)
        report.conditions |= _core_conditions(bench)
        report.conditions["repeats"] = {
            "core": options.repeats or sizes.core_repeats,
            "surface": sizes.surface_repeats,
            "traces": sizes.traces if traces is None else 1,
            "routed": sizes.routed_repeats,
        }
        report.core = measure_core(bench, options.repeats or sizes.core_repeats, Random(options.seed))
        style_folder("chatml", folder / "served" / "model")
        report.surface = measure_surface(
            folder / "served",
            SIZES,
            clients=sizes.surface_clients,
            turns=sizes.surface_turns,
            repeats=sizes.surface_repeats,
        )
        report.trace = measure_trace(
            traces,
            engines=sizes.engines,
            open_sessions=sizes.open_sessions,
            sessions=sizes.sessions,
            n_traces=sizes.traces,
            cache_tokens=sizes.cache_tokens,
            seed=options.seed,
        )
        report.decision_us = decision_us(
            sessions=4096, engines=16, requests=sizes.decisions, repeats=5, seed=options.seed
        )
        if python is None:
            report.left_out["sglang-router"] = reason
            print(f"bench_session: sglang-router is left out: {reason}", file=sys.stderr)
        else:
            report.conditions["sglang_router"] = peer.VERSION
            report.live = measure_live(
                python, folder, engines=sizes.backends, sessions=sizes.live_sessions, seed=options.seed
            )
        report.routed = measure_routed(
            folder,
            python,
            backends=sizes.backends,
            clients=sizes.clients,
            requests=sizes.requests,
            prompt_tokens=sizes.prompt_tokens,
            repeats=sizes.routed_repeats,
            seed=options.seed,
        )
    report.conditions["load_average_at_end"] = round(os.getloadavg()[0], 2)
    return report


def _core_conditions(bench: Bench) -> dict[str, Any]:
    return {
        "matcher": "loose_tool_call",
        "turns_per_repeat": TURNS_PER_REPEAT,
        "sampled_tokens_per_turn": SAMPLED_TOKENS,
        "new_prompt_tokens_per_turn": len(bench.path("64k")[-1].new_ids),
        "history_turns": {size: len(bench.path(size)) for size in SIZES},
    }


def _peer(options: argparse.Namespace) -> tuple[Path | None, str]:
    if options.no_peer:
        return None, "--no-peer"
    if options.install_peer:
        return peer.install(), ""
    return peer.find(), f"not installed in {peer.cache_folder()}: --install-peer makes its environment there"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_session", description="Benchmark sessions, their server and routing.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", dest="mode", action="store_const", const="quick", help="within 50 s on 2 cores")
    mode.add_argument("--smallest", dest="mode", action="store_const", const="smallest", help="only whether it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; all else on stderr")
    parser.add_argument("--repeats", type=int, help="of the session core, instead of the mode's own")
    parser.add_argument("--folder", metavar="FOLDER[:FAMILY]", help="a Hugging Face folder for the session core")
    parser.add_argument("--trace", type=Path, help="sessions to replay, one JSON object a line (trace.py)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--no-peer", action="store_true", help="leave sglang-router out")
    chosen.add_argument("--install-peer", action="store_true", help="make sglang-router's environment first")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.mode = options.mode or "full"
    try:
        report = measure({"quick": QUICK, "smallest": SMALLEST, "full": FULL}[options.mode], options)
    except (MilesError, RuntimeError, OSError) as error:  # among them TimeoutError
        print(f"bench_session: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    if options.json:
        json.dump(report.as_json(), sys.stdout, indent=1)
        print()
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 160))
    return 0


if __name__ == "__main__":
    sys.exit(main())
