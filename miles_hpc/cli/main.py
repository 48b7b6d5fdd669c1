"""miles-hpc: the command line. Commands import what they need when they run, so that --help is quick.

Exit codes: 0 done, 1 something failed, 2 bad input (one line on stderr, nothing written), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from miles_hpc.core import env, exits
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        module = importlib.import_module(f"miles_hpc.cli.{args.module}")
        return int(module.main(args) or 0)
    except MilesError as error:
        if env.read("MILES_HPC_DEBUG"):
            raise
        print(f"miles-hpc: error: {' '.join(str(error).split())}", file=sys.stderr)
        return exits.USER_ERROR if isinstance(error, UserError) else 1
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if env.read("MILES_HPC_DEBUG"):
            raise
        print(f"miles-hpc: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """With one line for a mistake; parsers of commands are of the same class."""

    def error(self, message: str) -> NoReturn:
        self.exit(exits.USER_ERROR, f"miles-hpc: error: {message}; `{self.prog} --help` says what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="miles-hpc",
        description="Reinforcement-learning post-training of large language models as Slurm batch jobs.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"miles-hpc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = _run_command(commands, "render", "print the batch script of a run")
    command = _run_command(commands, "submit", "prepare the run directory and submit the job")
    command.add_argument(
        "--dry-run", action="store_true", help="check everything, print the script (stdout) and what it asks for"
    )
    command.add_argument("--json", action="store_true", help="with --dry-run: one JSON object instead")
    command.add_argument("--watch", action="store_true", help="follow the run after submitting")
    command = _run_command(commands, "local", "run on this machine without Slurm")

    command = _dir_command(commands, "status", "where a run stands")
    command.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    command = _dir_command(commands, "watch", "follow a run live")
    command.add_argument("--once", action="store_true", help="draw one picture and return")
    command = _dir_command(commands, "report", "write report.html and report.png into the run directory")
    command = _dir_command(commands, "cancel", "end a run's job")
    command = _dir_command(commands, "resume", "submit the next allocation of a run that ended")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for example job.time=04:00:00"
    )
    command.add_argument("--watch", action="store_true", help="follow the run after submitting")

    command = _dir_command(commands, "side", "start a job beside a run: a check, an export, a sweep over nodes")
    command.add_argument(
        "name",
        metavar="NAME",
        help="verify-checkpoint, export, eval, doctor, or module:function of python_path",
    )
    command.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="for the function, for example step=100"
    )
    command.add_argument("--role", choices=["trainer", "rollout", "sandbox"], default="", help="whose nodes")
    command.add_argument("--nodes", type=int, metavar="N", help="one task on each; default: 1")
    command.add_argument("--gpus-per-node", type=int, metavar="N", help="default: 0")
    command.add_argument("--cpus-per-task", type=int, metavar="N", help="default: 1")
    command.add_argument("--time", metavar="LIMIT", help="as sbatch takes it")
    command.add_argument("--local", action="store_true", help="on this machine, also where there is a scheduler")
    command.add_argument(
        "--wait", type=float, metavar="SECONDS", help="wait for its end up to so long, and print what it returned"
    )
    command = _dir_command(commands, "jobs", "list the jobs of a run: its own and those beside it")
    command.add_argument("--json", action="store_true")
    command.add_argument("--cancel", type=int, metavar="SIDE", help="end the side job of this number")

    command = _dir_command(commands, "join", "lend this machine to a run that is going on, as one more host")
    command.add_argument("--role", choices=["rollout", "sandbox"], default="rollout", help="default: rollout")
    command.add_argument(
        "--wait",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for the run, and after an allocation of it for the next one; default: 600",
    )
    command.add_argument("--host", default="", help="name in the run; default: made of node, job and task")

    command = commands.add_parser(
        "sites", help="site files: list them, show one, check one against the cluster, find the one for this host"
    )
    command.set_defaults(module="sites")
    command.add_argument("action", choices=["list", "show", "check", "detect"])
    command.add_argument("site", nargs="?", default="", help="name of the site (show, check)")

    _doctor_command(commands)
    return parser


def _run_command(commands: argparse._SubParsersAction[_Parser], name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(module=name)
    command.add_argument("run", metavar="RUN.toml", help="a run file, or the name of a recipe")
    command.add_argument(
        "--site", default="", help="name or path of a site file; default: MILES_HPC_SITE, the run file's"
    )
    command.add_argument("--run-dir", default="", help="default: the run file's run_dir, or runs/<name>")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for example rollout.n_steps=20"
    )
    return command


def _doctor_command(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser(
        "doctor",
        help="is this cluster, are these nodes and this run directory fit for a run",
        description="Versions of what is installed, then checks, the worst first. "
        "Exit codes: 0 nothing fails (there may be warnings), 1 a check fails, 2 bad input.",
    )
    command.set_defaults(module="doctor")
    command.add_argument(
        "--site", default="", help="default: MILES_HPC_SITE, the run's, or the one that matches this host"
    )
    command.add_argument("--run", default="", metavar="RUN.toml", help="a run file or recipe: what will be asked for")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the run file")
    command.add_argument("--run-dir", default="", metavar="D", help="default: as the run file says")
    command.add_argument(
        "--on-nodes", type=int, default=None, metavar="N",
        help="look at N nodes as well: inside an allocation by a step, otherwise by a job of 5 minutes",
    )  # fmt: skip
    command.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS",
        help="until when the nodes must have answered, with the wait in the queue; default: 300",
    )  # fmt: skip
    for option in ("account", "qos", "partition"):
        command.add_argument(
            f"--{option}", default="", help=f"{option} of that job; default: as --run and the site say"
        )
    command.add_argument("--only", action="append", default=[], metavar="NAME,...", help="these checks alone")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--verdict", action="store_true", help="one line for a log; exit code 0 whatever was found")
    form.add_argument("--versions", action="store_true", help="versions alone")
    form.add_argument("--list", action="store_true", help="the checks, with reasons and sources")


def _dir_command(commands: argparse._SubParsersAction[_Parser], name: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(module={"watch": "follow", "report": "follow"}.get(name, name))
    command.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, or the run file or recipe it came from")
    return command


if __name__ == "__main__":
    sys.exit(main())
