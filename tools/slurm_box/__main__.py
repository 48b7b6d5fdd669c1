"""python -m tools.slurm_box: command line of the box. Exit code 2 and one line for what the caller can put right."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from miles_hpc.core import exits
from miles_hpc.core.errors import MilesError, UserError
from tools.slurm_box.box import Box, default_root
from tools.slurm_box.plan import BoxSpec

__all__ = ["main"]

_DEFAULT_NODES = BoxSpec().nodes_text


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.slurm_box", description="A real Slurm cluster on this host.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, default=None, metavar="DIR", help=f"default {default_root()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser(
        "up", parents=[common], help="start the box, or what is missing of it; without options: as last time"
    )
    up.add_argument("--nodes", metavar="GROUP:COUNT,...", help=f"a partition per group; default {_DEFAULT_NODES}")
    up.add_argument("--gpus", metavar="GROUP:COUNT,...", help="fake GPUs per node of a group; default none")
    up.add_argument("--cpus", type=int, metavar="N", help="CPUs that a node declares; default 8")
    up.add_argument(
        "--netns", action="store_true", help="each node a host of its own: cut and restore work (root only)"
    )
    up.add_argument("--accounting", action="store_true", help="with mariadb and slurmdbd: sacct works")
    up.add_argument("--name", metavar="CLUSTER", help="the cluster's name; default miles")
    up.add_argument("--node-timeout", type=int, metavar="S", help="SlurmdTimeout; default 5")

    commands.add_parser("down", parents=[common], help="cancel jobs, end every process; the folder stays")
    commands.add_parser("status", parents=[common], help="nodes, jobs and daemons")
    commands.add_parser("env", parents=[common], help="print the export line")
    history = commands.add_parser("history", parents=[common], help="jobs that ended, one line per start and component")
    history.add_argument("--json", action="store_true", help="one JSON object per line")
    kill = commands.add_parser("kill", parents=[common], help="power cut of a node")
    kill.add_argument("--silent", action="store_true", help="let slurmctld notice by itself")
    start = commands.add_parser("start", parents=[common], help="power on again")
    cut = commands.add_parser("cut", parents=[common], help="pull a node's network cable (netns)")
    restore = commands.add_parser("restore", parents=[common], help="plug it in again (netns)")
    restore.add_argument("--resume", action="store_true", help="tell slurmctld, rather than wait some 20 s")
    for command in (kill, start, cut, restore):
        command.add_argument("node", metavar="NODE")
    return top


def _spec(options: argparse.Namespace, stored: BoxSpec | None) -> BoxSpec | None:
    """The spec asked for; None, meaning the folder's last one, when no option was given."""
    given = {"cpus": options.cpus, "cluster": options.name, "node_timeout_s": options.node_timeout}
    rest = {key: value for key, value in given.items() if value is not None}
    rest |= {key: True for key in ("netns", "accounting") if getattr(options, key)}
    if not rest and options.nodes is None and options.gpus is None and stored is not None:
        return None
    return BoxSpec.parse(options.nodes or _DEFAULT_NODES, options.gpus or "", **rest)


def _up(box: Box, options: argparse.Namespace) -> None:
    seconds = box.up(_spec(options, box.spec()))
    export = f"export SLURM_CONF={box.root}/slurm.conf"
    if not box.started:
        print(f"already up; {export}")
    elif len(box.started) < len(box.daemons()):
        print(f"repaired in {seconds:.2f} s: {' '.join(box.started)}; {export}")
    else:
        print(f"up in {seconds:.2f} s; {export}")


def _status(box: Box) -> None:
    daemons, cables = box.daemons(), box.cables()
    spec = box.spec()
    print(f"box {box.root}: {spec.describe() if spec else ''}")
    print("daemons")
    for name, pid in daemons.items():
        print(f"  {name:<16} {'off' if pid is None else f'pid {pid}'}")
    if daemons["slurmctld"] is None:
        return
    print("nodes")
    for name, state in box.nodes().items():
        cable = "" if name not in cables else "  cable in" if cables[name] else "  cable out"
        print(f"  {name:<16} {state}{cable}")
    jobs = box.run("squeue", "-a", "-h", "-o", "%.14i %.12P %.20j %.10T %.10M %R").splitlines()
    print("jobs" if jobs else "no jobs")
    for line in jobs:
        print(f"  {line}")


def _history(box: Box, as_json: bool) -> None:
    for record in box.history():
        if as_json:
            print(json.dumps(asdict(record)))
            continue
        component = "" if record.het_job_id is None else f" {record.het_job_id}+{record.het_offset}"
        span = f"{record.start} to {record.end}"
        print(
            f"{record.job_id}{component} {record.name} {record.state} {span} on {','.join(record.nodes) or 'no node'}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    box = Box(options.root)
    try:
        if options.command == "up":
            _up(box, options)
        elif options.command == "down":
            known = box.spec() is not None
            box.down()
            print(f"{box.root} is down" if known else f"{box.root}: no box here, nothing to end")
        elif options.command == "status":
            _status(box)
        elif options.command == "env":
            box.daemons()  # refuses a folder without a box
            print(f"export SLURM_CONF={box.root}/slurm.conf")
        elif options.command == "history":
            _history(box, options.json)
        elif options.command == "kill":
            box.kill_node(options.node, tell=not options.silent)
        elif options.command == "start":
            box.start_node(options.node)
        elif options.command == "cut":
            box.cut(options.node)
        else:
            box.restore(options.node, resume=options.resume)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except MilesError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
