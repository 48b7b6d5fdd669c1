"""Command line of the control-plane benchmark.

python -m tools.bench_control [--quick] [--json] [--arms ray,ours-tcp] [--seed N]
"""

from __future__ import annotations

import argparse
import signal
import sys

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from miles_hpc.core.errors import MilesError, UserError
from tools.bench_control import plan
from tools.bench_control.run import measure
from tools.bench_control.session import adopt_orphans
from tools.bench_control.table import show


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench_control", description="Our control layer beside Ray, ZeroMQ, MPI and UCX, in one run."
    )
    parser.add_argument(
        "--quick", action="store_true", help="within 50 s on 2 cores; the default takes some 10 minutes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout; everything else on stderr")
    parser.add_argument("--arms", default="", metavar="NAMES", help=f"names or prefixes: {', '.join(plan.ARMS)}")
    parser.add_argument("--repeats", type=int, default=None, help="instead of the mode's own number")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of operations per cell")
    parser.add_argument("--seed", type=int, default=0, help="of the order of stages")
    args = parser.parse_args()
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 160)
    try:
        settings = plan.quick() if args.quick else plan.full()
        settings = plan.adjusted(settings, repeats=args.repeats, scale=args.scale)
        specs = plan.select(args.arms, quick=args.quick)
        adopt_orphans()
        signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: whatever was started is ended first
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task("starting", total=None)

            def progress(done: int, total: int, text: str) -> None:
                bar.update(task, completed=done, total=total, description=text)

            report = measure(settings, specs, seed=args.seed, progress=progress)
    except MilesError as error:
        print(f"bench_control: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("bench_control: interrupted; everything that it started has been ended", file=sys.stderr)
        return 130
    show(report, console)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(report.as_json()) + b"\n")
    return 0


def _end(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; ending takes a few seconds
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
