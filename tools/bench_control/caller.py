"""A caller process: loads one arm, and times it as the run asks over a unix socket, one JSON line per message.

python -m tools.bench_control.caller ARM --socket PATH --folder DIR --cores 0,1
mpiexec -n 1+N python -m tools.bench_control.caller ARM ...        rank 0 calls, the others are its peers
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from tools.bench_control.arm import Arm
from tools.bench_control.peers import die_with, failed
from tools.bench_control.plan import ARMS, ArmSpec, Cell
from tools.bench_control.spread import Spread, spread

__all__ = ["Ask", "Told"]


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the run wants: start (n peers), measure (a cell), stop, or end."""

    do: str
    n_peers: int = 0
    folder: str = ""
    cell: Cell | None = None


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer. `error` is empty on success."""

    error: str = ""
    spread: Spread | None = None
    chosen: dict[str, str] = {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="caller")
    parser.add_argument("arm", choices=sorted(ARMS))
    parser.add_argument("--socket", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cores", required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    cores = [int(core) for core in args.cores.split(",")]
    spec = ARMS[args.arm]
    if not ARMS[args.arm].mpi:  # ranks are children of mpiexec, which ends with its caller
        die_with(args.parent)
    pids: list[int] = []
    if spec.mpi:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
        pids = MPI.COMM_WORLD.allgather(os.getpid())
        if rank:
            try:
                module = importlib.import_module(spec.module)
                module.serve_rank(rank, args.folder, spec.cls, *spec.options)
            except Exception as error:  # not on to the interpreter's end: MPI_Finalize would wait for rank 0 there
                failed(args.folder, rank - 1, error)
                return 1
            return 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(args.socket)
        with channel.makefile("rwb") as stream:
            serve(spec, args.folder, cores, pids[1:], stream)
    return 0


def serve(spec: ArmSpec, folder: Path, cores: list[int], ranks: list[int], stream: Any) -> None:
    """Answer the run until it says end or hangs up."""
    arm: Arm | None = None
    try:
        for line in stream:
            ask = msgspec.json.decode(line, type=Ask)
            if ask.do == "end":
                break
            try:
                if arm is None:
                    cls = getattr(importlib.import_module(spec.module), spec.cls)
                    arm = cls(folder, cores, *spec.options)
                    arm.peer_pids = ranks
                told = answer(arm, ask)
            except Exception as error:
                traceback.print_exc()
                told = Told(error=reason(error))
            stream.write(msgspec.json.encode(told) + b"\n")
            stream.flush()
    finally:
        if arm is not None:
            arm.close()


def answer(arm: Arm, ask: Ask) -> Told:
    """Do one thing."""
    match ask.do:
        case "start":
            arm.folder = Path(ask.folder)
            arm.start(ask.n_peers)
            return Told(chosen=arm.describe())
        case "measure":
            assert ask.cell is not None
            arm.check(ask.cell)
            if ask.cell.placement != "any":
                arm.place(ask.cell.placement)
            return Told(spread=spread(arm.measure(ask.cell)))
        case "stop":
            arm.stop()
        case other:
            raise ValueError(f"{other!r}: expected start, measure, stop or end")
    return Told()


def reason(error: Exception) -> str:
    """One line; for a missing package with the way to get it."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        return f"{text}; install it: pip install -e '.[bench,ucx,mpich]'"
    return text[:500]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # some libraries' threads outlive main
