"""Daemons of a box: which there are, how each is started, and when it counts as started.

munged ─ [mariadbd ─ slurmdbd] ─ slurmctld ─ node-<name> for each node: slurmd, or what holds its namespaces
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from tools.slurm_box import accounting, namespaces
from tools.slurm_box.plan import Node, Plan
from tools.slurm_box.processes import Process, find_binary, read_record, spawn, wait_until

__all__ = ["client_environ", "daemon", "daemon_names", "last_line", "node_daemon", "record", "start", "start_node"]

#: Variables of an outer job or MPI world; they would change what clients and daemons of the box do.
_OUTER = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SINFO_", "SQUEUE_", "PMI_", "PMIX_")


def client_environ(root: Path) -> dict[str, str]:
    """This process's environment without an outer job's variables, with SLURM_CONF of this box."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_OUTER)} | {"SLURM_CONF": f"{root}/slurm.conf"}


def daemon_names(plan: Plan) -> list[str]:
    """All daemons that should run, in the order of their start."""
    database = ["mariadbd", "slurmdbd"] if plan.spec.accounting else []
    return ["munged", *database, "slurmctld", *(node_daemon(node.name) for node in plan.nodes)]


def node_daemon(node: str) -> str:
    """A node's name among the daemons; no node name can collide with another daemon's."""
    return f"node-{node}"


def record(root: Path, name: str) -> Path:
    """Where the daemon's identity is recorded."""
    return root / "run" / f"{name}.json"


def daemon(root: Path, name: str) -> Process | None:
    """The daemon if it is alive."""
    return read_record(record(root, name))


def start(plan: Plan, name: str, deadline: Deadline) -> None:
    """Start one daemon that isn't running; returns when the next one may start."""
    root, environ = plan.root, client_environ(plan.root)
    if name == "munged":
        _start_munged(plan, deadline)
    elif name == "mariadbd":
        accounting.start_database(plan, environ, record(root, name), deadline)
    elif name == "slurmdbd":
        accounting.start_slurmdbd(plan, environ, record(root, name))
        _await_listener(plan, name, plan.base_port + 1, deadline)
    elif name == "slurmctld":
        if plan.spec.accounting:
            accounting.register_cluster(plan, environ, deadline)
        spawn([find_binary("slurmctld"), "-D"], environ, log=_log(root, name), record=record(root, name))
        _await_listener(plan, name, plan.base_port, deadline)
    else:
        start_node(plan, plan.node(name.removeprefix("node-")), deadline)


def start_node(plan: Plan, node: Node, deadline: Deadline) -> None:
    """Start a node's slurmd; it registers by itself a moment later."""
    # PMIX_HOSTNAME: with two nodes on a host, a PMIx server would otherwise find no peers under the node's name.
    environ = client_environ(plan.root) | {"PMIX_HOSTNAME": node.name}
    name = node_daemon(node.name)
    log, identity = _log(plan.root, name), record(plan.root, name)
    if plan.spec.netns:
        namespaces.start_host(plan, node, environ, log, identity, deadline)
    else:
        spawn([find_binary("slurmd"), "-D", "-N", node.name], environ, log=log, record=identity)


def _start_munged(plan: Plan, deadline: Deadline) -> None:
    folder, log = plan.root / "munge", _log(plan.root, "munged")
    options = [
        f"--socket={plan.munge_socket}",
        f"--key-file={folder}/munge.key",
        f"--log-file={folder}/munged.log",
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/munged.seed",
        "--num-threads=2",
    ]
    plan.munge_socket.unlink(missing_ok=True)
    argv = [find_binary("munged"), "--foreground", *options]
    spawn(argv, client_environ(plan.root), log=log, record=record(plan.root, "munged"))

    def answers() -> bool:
        _expect_alive(plan.root, "munged")
        return _connects(socket.AF_UNIX, str(plan.munge_socket))

    wait_until(answers, deadline)


def _await_listener(plan: Plan, name: str, port: int, deadline: Deadline) -> None:
    def listens() -> bool:
        _expect_alive(plan.root, name)
        return _connects(socket.AF_INET, (plan.controller_address, port))

    wait_until(listens, deadline)


def _expect_alive(root: Path, name: str) -> None:
    if daemon(root, name) is None:
        raise UserError(f"{name} ended at its start: {last_line(root, name)}")


def _log(root: Path, name: str) -> Path:
    return root / "log" / f"{name}.out"


def last_line(root: Path, name: str) -> str:
    """The most telling line that the daemon has written, and where it stands."""
    try:
        lines = _log(root, name).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    telling = [line for line in lines if "fatal" in line or "error" in line.lower()] or lines
    return f"{telling[-1] if telling else 'nothing logged'} (see {_log(root, name)})"


def _connects(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(address)
        except OSError:
            return False
        return True
