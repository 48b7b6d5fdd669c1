"""A box: a real slurmctld, munged and several slurmd on one host, everything below one private folder.

    up    claim the folder ─ (host lock: ports, slot) ─ render ─ munged ─ [database] ─ slurmctld ─ nodes ─ all idle
    down  cancel jobs ─ nodes ─ leftovers ─ slurmctld ─ [database] ─ munged ─ [bridge]
    kill  power cut of a node ─ (tell slurmctld)        start  power on ─ node usable
    cut   pull a node's cable                           restore  plug it in ─ (tell slurmctld)

plan.py      pure: spec, addresses, text of the configuration     folder.py     ownership, locks, ports, files
processes.py spawn, recognise, end                                daemons.py    how each daemon starts
namespaces.py nodes as hosts of their own                         faults.py     power cuts
accounting.py optional database                                   history.py    records of ended jobs
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, UserError
from tools.slurm_box import faults, folder, namespaces
from tools.slurm_box.daemons import (
    client_environ,
    daemon,
    daemon_names,
    last_line,
    node_daemon,
    record,
    start,
    start_node,
)
from tools.slurm_box.history import JobRecord, read_history
from tools.slurm_box.plan import BoxSpec, Node, Plan
from tools.slurm_box.processes import end

__all__ = ["Box", "default_root"]


def default_root() -> Path:
    """/tmp/miles-box-<uid>: short, because unix sockets lie below it."""
    return Path(tempfile.gettempdir()) / f"miles-box-{os.getuid()}"


class Box:
    """One box, running or not. Every method blocks until its effect is visible to Slurm's clients, or raises.

    Objects hold no state of the box: several processes may work on one folder.
    Raises UserError for what the caller can put right, DeadlineExpired when a daemon doesn't do its part in time.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        self.root = (default_root() if root is None else Path(root)).expanduser().resolve()
        self.started: tuple[str, ...] = ()  # daemons that the last up() of this object started

    # -- life ---------------------------------------------------------------------------------------------------------

    def up(self, spec: BoxSpec | None = None, *, timeout_s: float = 60.0) -> float:
        """Start the box, or what is missing of it; returns the seconds that it took.

        spec: default is the folder's last one, or BoxSpec(). A stopped box with another spec starts as a new cluster,
        without its old jobs and history; a running one refuses.
        """
        begin = time.monotonic()
        deadline = Deadline(timeout_s, f"box {self.root} to be up")
        stored = folder.load(self.root)
        wanted = spec or (stored.spec if stored else BoxSpec())
        folder.check(self.root, wanted)
        folder.claim(self.root)
        with folder.lock(self.root, deadline):
            stored = folder.load(self.root)
            running = [] if stored is None else [n for n in daemon_names(stored) if daemon(self.root, n)]
            if stored is not None and running:
                if wanted != stored.spec:
                    raise UserError(
                        f"{self.root} runs `{stored.spec.describe()}`, asked for `{wanted.describe()}`; "
                        "expected the same: run `down` first, or use another --root"
                    )
                self._start_missing(stored, deadline)
            else:
                with folder.host_lock(deadline):
                    plan = folder.prepare(self.root, wanted, stored)
                    self._start_missing(plan, deadline)
        return time.monotonic() - begin

    def down(self, *, timeout_s: float = 60.0) -> None:
        """Cancel all jobs and end every process of the box; the folder with its logs and history stays."""
        deadline = Deadline(timeout_s, f"box {self.root} to be down")
        plan = folder.load(self.root)
        if plan is None:
            return
        with folder.lock(self.root, deadline):
            if daemon(self.root, "slurmctld") is not None:
                self._cancel_jobs()
            nodes = [p for p in (daemon(self.root, node_daemon(node.name)) for node in plan.nodes) if p is not None]
            end(nodes, grace_s=10.0, sig=signal.SIGKILL if plan.spec.netns else signal.SIGTERM)
            faults.kill_leftovers(self.root)
            for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
                process = daemon(self.root, name)
                if process is not None:
                    end([process], grace_s=15.0)
            if plan.spec.netns:
                namespaces.remove_bridge(plan)
            for name in daemon_names(plan):
                record(self.root, name).unlink(missing_ok=True)

    # -- faults -------------------------------------------------------------------------------------------------------

    def kill_node(self, name: str, *, tell: bool = True) -> None:
        """Power cut: slurmd, step daemons and tasks of the node end at once.

        tell: report it to slurmctld as an operator would; otherwise it notices by itself after SlurmdTimeout.
        """
        plan = self._running()
        node = plan.node(name)
        with folder.lock(self.root, Deadline(60.0, f"lock of {self.root}")):
            holder = daemon(self.root, node_daemon(name))
            faults.power_cut(self.root, name, holder, own_host=plan.spec.netns)
            record(self.root, node_daemon(name)).unlink(missing_ok=True)
        if tell:
            self.run("scontrol", "update", f"nodename={node.name}", "state=down", "reason=power_cut")

    def start_node(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Power on; returns when Slurm may use the node."""
        plan = self._running()
        node = plan.node(name)
        deadline = Deadline(timeout_s, f"node {name} to register")
        with folder.lock(self.root, deadline):
            if daemon(self.root, node_daemon(name)) is None:
                start_node(plan, node, deadline)
            self._await_nodes([node], deadline)

    def cut(self, name: str) -> None:
        """Pull the node's network cable (netns only); its tasks run on, which is what a split brain is."""
        namespaces.set_cable(self._cabled(name), up=False)

    def restore(self, name: str, *, resume: bool = False) -> None:
        """Plug the cable in again. The node comes back by itself in some 20 s; `resume` tells slurmctld at once."""
        namespaces.set_cable(self._cabled(name), up=True)
        if resume:
            self.run("scontrol", "update", f"nodename={name}", "state=resume")

    # -- questions ----------------------------------------------------------------------------------------------------

    def env(self) -> dict[str, str]:
        """This process's environment for Slurm's clients of this box: SLURM_CONF, and nothing of an outer job."""
        return client_environ(self.root)

    def run(self, *argv: str, timeout_s: float = 60.0) -> str:
        """Standard output of a client such as sinfo or sbatch. Raises UserError when it fails, with its first line."""
        try:
            result = subprocess.run(
                argv,
                env=client_environ(self.root),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineExpired(f"{' '.join(argv)}: no answer within {timeout_s:.0f} s") from error
        except FileNotFoundError as error:
            raise UserError(f"{argv[0]} isn't installed; run: apt-get install slurm-client") from error
        if result.returncode:
            said = (result.stderr.strip() or result.stdout.strip() or "nothing").splitlines()[0]
            raise UserError(f"{' '.join(argv)}: exit code {result.returncode}: {said}")
        return result.stdout

    def nodes(self) -> dict[str, str]:
        """node -> Slurm's word for its state (idle, mixed, allocated, down, ...); `*` behind it: not responding."""
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def history(self) -> list[JobRecord]:
        """What has ended so far, one record per start and component; also of a stopped box."""
        return read_history(self.root / "log" / "jobcomp.log")

    def spec(self) -> BoxSpec | None:
        """What the folder was last started with; None when it holds no box."""
        plan = folder.load(self.root)
        return None if plan is None else plan.spec

    def daemons(self) -> dict[str, int | None]:
        """daemon or node -> pid, None when it should run and doesn't. Raises UserError when there is no box."""
        plan = self._expect()
        return {name: None if (p := daemon(self.root, name)) is None else p.pid for name in daemon_names(plan)}

    def cables(self) -> dict[str, bool]:
        """node -> whether its cable is plugged in; empty without network namespaces."""
        plan = self._expect()
        return namespaces.cable_up(plan.nodes) if plan.spec.netns else {}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _expect(self) -> Plan:
        plan = folder.load(self.root)
        if plan is None:
            raise UserError(f"{self.root}: no box here; run `python -m tools.slurm_box up --root {self.root}`")
        return plan

    def _running(self) -> Plan:
        plan = self._expect()
        if daemon(self.root, "slurmctld") is None:
            raise UserError(
                f"{self.root}: slurmctld isn't running; run `python -m tools.slurm_box up --root {self.root}`"
            )
        return plan

    def _cabled(self, name: str) -> Node:
        plan = self._running()
        node = plan.node(name)
        if not plan.spec.netns:
            raise UserError(f"{self.root}: its nodes share the host's network; expected a box started with --netns")
        if daemon(self.root, node_daemon(name)) is None:
            raise UserError(f"node {name} is off, so it has no cable; run `start {name}` first")
        return node

    def _start_missing(self, plan: Plan, deadline: Deadline) -> None:
        if plan.spec.netns:  # first: until then the subnet's packets would leave by the default route
            namespaces.create_bridge(plan)
        started = []
        for name in daemon_names(plan):
            if daemon(self.root, name) is None:
                try:
                    start(plan, name, deadline)
                except DeadlineExpired as error:
                    raise DeadlineExpired(f"{error}; waited for {name}: {last_line(self.root, name)}") from error
                started.append(name)
        self._await_nodes(plan.nodes, deadline)
        self.started = tuple(started)

    def _await_nodes(self, nodes: tuple[Node, ...] | list[Node], deadline: Deadline) -> None:
        """Until Slurm may use each node, or an operator has drained it.

        A node that registers comes up by itself; one that stays down though its slurmd runs was set down by hand: it is
        resumed.
        """
        patience, resumed = Deadline(2.0, "nodes to register"), False
        while True:
            for node in nodes:
                name = node_daemon(node.name)
                process = daemon(self.root, name)
                if process is None:
                    raise UserError(f"{name} ended at its start: {last_line(self.root, name)}")
            try:
                states = self.nodes()
            except UserError:
                states = {}  # slurmctld has only just begun to answer
            waiting = [n.name for n in nodes if not _usable(states.get(n.name, "unknown"))]
            if not waiting:
                return
            if deadline.expired:
                seen = ", ".join(f"{name} {states.get(name, 'unknown')}" for name in waiting)
                raise DeadlineExpired(f"{deadline.error()}; not usable: {seen}; see {self.root}/log")
            down = [name for name in waiting if states.get(name) == "down"]
            if down and patience.expired and not resumed:
                self.run("scontrol", "update", f"nodename={','.join(down)}", "state=resume")
                resumed = True
            time.sleep(0.05)

    def _cancel_jobs(self) -> None:
        """Cancel everything; what resists is killed with its node."""
        deadline = Deadline(5.0, "jobs to end")
        try:
            while jobs := set(self.run("squeue", "-h", "-a", "-o", "%i", timeout_s=10.0).split()):
                leaders = sorted({job.partition("+")[0] for job in jobs})
                for options in (["-f", "-s", "KILL"], []):
                    subprocess.run(
                        ["scancel", *options, *leaders],
                        env=client_environ(self.root),
                        capture_output=True,
                        timeout=10,
                        stdin=subprocess.DEVNULL,
                    )
                if deadline.expired:
                    return
                time.sleep(0.1)
        except (UserError, DeadlineExpired, subprocess.TimeoutExpired):
            return  # slurmctld doesn't answer: it is about to be ended anyway


def _usable(state: str) -> bool:
    usable = ("idle", "mixed", "allocated", "completing", "planned", "reserved", "draining", "drained")
    return state.rstrip("#~$@^-") in usable
