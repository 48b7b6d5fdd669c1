"""Faults on purpose: power cuts. (Pulled cables: namespaces.set_cable.)"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from miles_hpc.core.deadline import Deadline
from tools.slurm_box.processes import Process, process_of, step_daemons, tasks, wait_until

__all__ = ["kill_leftovers", "power_cut"]


def power_cut(root: Path, node: str, daemon: Process | None, *, own_host: bool) -> None:
    """End everything of a node at once, without a word to Slurm.

    daemon: the node's slurmd, or the process that holds its namespaces (`own_host`), which takes all others along.
    """
    if daemon is not None:
        inside = tasks(root, node, below=[daemon.pid]) if own_host else set()
        family = [daemon, *(p for p in map(process_of, inside) if p is not None)]
        daemon.kill(signal.SIGKILL)
        wait_until(partial(_all_gone, family), Deadline(10.0, f"processes of {node} to end"))
    if not own_host:
        kill_leftovers(root, node)


def kill_leftovers(root: Path, node: str | None = None) -> None:
    """Kill step daemons and then tasks of this box (of one node if given) until none is found.

    In this order: a step daemon that saw its tasks die would report a failed job rather than a lost node.
    """
    deadline = Deadline(15.0, f"tasks of {node or root} to end")
    while True:
        daemons = list(step_daemons(root, node))
        found = [*daemons, *tasks(root, node, below=daemons)]
        processes = [process for process in map(process_of, found) if process is not None and process.alive]
        if not processes:
            return
        deadline.check()
        for process in processes:
            process.kill(signal.SIGKILL)
        wait_until(partial(_all_gone, processes), deadline)


def _all_gone(processes: Sequence[Process]) -> bool:
    return not any(process.alive for process in processes)
