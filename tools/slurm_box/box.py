"""A box: a real slurmctld, munged and several slurmd on one host, everything below one private folder.

    <root>/  box.json           what was built: spec, ports, slot; makes the folder ours
             slurm.conf ...     rendered by plan.py
             munge/ db/         key, sockets, database
             state/ spool/ tmp/ of slurmctld, and per node
             run/               one record per daemon: pid, start time, boot
             log/               of every daemon, and jobcomp.log: the history

    up    claim the folder ─ (host lock: ports, slot) ─ render ─ munged ─ [database] ─ slurmctld ─ nodes ─ all idle
    down  cancel jobs ─ nodes ─ leftovers ─ slurmctld ─ [database] ─ munged ─ [bridge]

Two locks: a file lock in the folder for `up`, `down` and faults of one box, and an abstract unix socket for the search
of free ports among all boxes of the host. Both end with the process that holds them.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, UserError
from tools.slurm_box import accounting, faults, namespaces
from tools.slurm_box.daemons import Process, end, find_binary, read_record, spawn, wait_until, write_record
from tools.slurm_box.history import JobRecord, read_history
from tools.slurm_box.plan import PORT_BLOCK, BoxSpec, Node, Plan, max_root_length, ports_needed

__all__ = ["Box", "default_root"]

_FIRST_PORT, _LAST_PORT = 20480, 32768  # below Linux's default range for outgoing connections
_HOST_LOCK = "\0miles-hpc.slurm-box"
_FOLDERS = ("munge", "state", "spool", "tmp", "run", "log", "dev")


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
        stored = self._load()
        wanted = spec or (stored.spec if stored else BoxSpec())
        self._check(wanted)
        self._claim()
        with self._lock(deadline):
            stored = self._load()
            running = [] if stored is None else self._alive(stored)
            if stored is not None and running:
                if wanted != stored.spec:
                    raise UserError(
                        f"{self.root} runs `{stored.spec.describe()}`, asked for `{wanted.describe()}`; "
                        "expected the same: run `down` first, or use another --root"
                    )
                self._start_missing(stored, deadline)
            else:
                with _host_lock(deadline):
                    plan = self._prepare(wanted, stored)
                    self._start_missing(plan, deadline)
        return time.monotonic() - begin

    def down(self, *, timeout_s: float = 60.0) -> None:
        """Cancel all jobs and end every process of the box; the folder with its logs and history stays."""
        deadline = Deadline(timeout_s, f"box {self.root} to be down")
        plan = self._load()
        if plan is None:
            return
        with self._lock(deadline):
            if self._daemon("slurmctld") is not None:
                self._cancel_jobs()
            nodes = [p for p in (self._daemon(_node_daemon(node.name)) for node in plan.nodes) if p is not None]
            end(nodes, grace_s=10.0, sig=signal.SIGKILL if plan.spec.netns else signal.SIGTERM)
            faults.kill_leftovers(self.root)
            for name in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
                process = self._daemon(name)
                if process is not None:
                    end([process], grace_s=15.0)
            if plan.spec.netns:
                namespaces.remove_bridge(plan)
            for record in (self.root / "run").glob("*.json"):
                record.unlink()

    # -- faults -------------------------------------------------------------------------------------------------------

    def kill_node(self, name: str, *, tell: bool = True) -> None:
        """Power cut: slurmd, step daemons and tasks of the node end at once.

        tell: report it to slurmctld as an operator would; otherwise it notices by itself after SlurmdTimeout.
        """
        plan = self._running()
        node = plan.node(name)
        with self._lock(Deadline(60.0, f"lock of {self.root}")):
            record = self._record(_node_daemon(name))
            faults.power_cut(self.root, name, read_record(record), own_host=plan.spec.netns)
            record.unlink(missing_ok=True)
        if tell:
            self.run("scontrol", "update", f"nodename={node.name}", "state=down", "reason=power_cut")

    def start_node(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Power on; returns when Slurm may use the node."""
        plan = self._running()
        node = plan.node(name)
        deadline = Deadline(timeout_s, f"node {name} to register")
        with self._lock(deadline):
            if self._daemon(_node_daemon(name)) is None:
                self._start_node(plan, node, deadline)
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
        """This process's environment for Slurm's clients of this box: with SLURM_CONF, without an outer job's variables."""
        outer = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "PMI_")
        environ = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
        return environ | {"SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *argv: str, timeout_s: float = 60.0) -> str:
        """Standard output of a client such as sinfo or sbatch. Raises UserError when it fails, with its first line."""
        try:
            result = subprocess.run(
                argv, env=self.env(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
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
        plan = self._load()
        return None if plan is None else plan.spec

    def daemons(self) -> dict[str, int | None]:
        """daemon or node -> pid, None when it should run and doesn't. Raises UserError when there is no box."""
        plan = self._expect()
        return {name: None if (p := self._daemon(name)) is None else p.pid for name in _daemon_names(plan)}

    def cables(self) -> dict[str, bool]:
        """node -> whether its cable is plugged in; empty without network namespaces."""
        plan = self._expect()
        return namespaces.cable_up(plan.nodes) if plan.spec.netns else {}

    # -- the folder ---------------------------------------------------------------------------------------------------

    def _load(self) -> Plan | None:
        path = self.root / "box.json"
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            spec = BoxSpec.from_json(data["spec"])
            uid, root = data["uid"], data["root"]
            plan = _plan(self.root, spec, base_port=data["base_port"], slot=data["slot"])
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise UserError(f"{path}: not readable; expected a box of your own: use another --root") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a box of this version ({error!r}); remove {self.root}") from error
        if uid != os.getuid() or root != str(self.root):
            raise UserError(
                f"{self.root} belongs to another box (uid {uid}, root {root}); expected uid {os.getuid()}: use another --root"
            )
        return plan

    def _check(self, spec: BoxSpec) -> None:
        """What must be there before anything is written."""
        for name in ("slurmctld", "slurmd", "munged", "sinfo"):
            find_binary(name)
        if spec.netns:
            namespaces.require_root("--netns")
            for name in ("ip", "unshare", "bash"):
                find_binary(name)
        if spec.accounting:
            for name in accounting.PROGRAMS:
                find_binary(name)
        length, limit = len(os.fsencode(self.root)), max_root_length(spec)
        if length > limit:
            raise UserError(
                f"--root {self.root}: {length} bytes; expected {limit} at most, for unix sockets below it: use a shorter path"
            )
        if any(c.isspace() or c in '#%,"' for c in str(self.root)):
            raise UserError(f"--root {str(self.root)!r}: expected a path without spaces, #, %, comma and quotes")

    def _claim(self) -> None:
        """Make the folder ours, or refuse it."""
        root = self.root
        try:
            root.mkdir(mode=0o755, parents=True, exist_ok=True)
            owner = root.stat().st_uid
        except OSError as error:
            raise UserError(f"--root {root}: {error.strerror}; expected a folder that can be created here") from error
        if owner != os.getuid() or not os.access(root, os.W_OK | os.X_OK):
            raise UserError(
                f"--root {root}: owned by uid {owner}, not writable as yours; expected a folder of your own"
            )
        if not (root / "box.json").exists() and any(entry.name != "box.lock" for entry in root.iterdir()):
            raise UserError(f"--root {root}: holds other files and no box; expected an empty or new folder")
        root.chmod(0o755)
        for folder in root.parents:
            if not folder.stat().st_mode & 0o001:
                raise UserError(
                    f"--root {root}: others can't enter {folder}, so munged refuses its socket; expected mode o+x on each folder above"
                )

    @contextmanager
    def _lock(self, deadline: Deadline) -> Iterator[None]:
        fd = os.open(self.root / "box.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    deadline.check()
                    time.sleep(0.05)
            yield
        finally:
            os.close(fd)

    def _prepare(self, spec: BoxSpec, stored: Plan | None) -> Plan:
        """Choose ports and slot, write every file. Call under the host's lock, with nothing running."""
        root = self.root
        faults.kill_leftovers(root)
        if stored is not None:
            if stored.spec.netns:
                namespaces.remove_bridge(stored)
            if stored.spec != spec:
                for name in ("state", "spool", "tmp", "db"):
                    shutil.rmtree(root / name, ignore_errors=True)
                stored.history_file.unlink(missing_ok=True)
        slot = namespaces.free_slot() if spec.netns else 0
        plan = _plan(root, spec, base_port=_free_ports(ports_needed(spec)), slot=slot)
        _publish(
            root / "box.json",
            json.dumps(
                {
                    "spec": spec.to_json(),
                    "uid": os.getuid(),
                    "root": str(root),
                    "base_port": plan.base_port,
                    "slot": slot,
                },
                indent=1,
            ),
        )
        for name in _FOLDERS + (("db",) if spec.accounting else ()):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o755)
        for node in plan.nodes:
            for parent in ("spool", "tmp"):
                (root / parent / node.name).mkdir(exist_ok=True)
        for k in range(plan.fake_gpus):
            if not (root / "dev" / f"gpu{k}").is_symlink():
                (root / "dev" / f"gpu{k}").symlink_to(os.devnull)
        key = root / "munge" / "munge.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(256))
        _publish(plan.conf, plan.slurm_conf())
        _publish(root / "gres.conf", plan.gres_conf())
        _publish(root / "cgroup.conf", plan.cgroup_conf())
        return plan

    # -- daemons ------------------------------------------------------------------------------------------------------

    def _record(self, daemon: str) -> Path:
        return self.root / "run" / f"{daemon}.json"

    def _daemon(self, daemon: str) -> Process | None:
        return read_record(self._record(daemon))

    def _alive(self, plan: Plan) -> list[str]:
        return [name for name in _daemon_names(plan) if self._daemon(name) is not None]

    def _expect(self) -> Plan:
        plan = self._load()
        if plan is None:
            raise UserError(f"{self.root}: no box here; run `python -m tools.slurm_box up --root {self.root}`")
        return plan

    def _running(self) -> Plan:
        plan = self._expect()
        if self._daemon("slurmctld") is None:
            raise UserError(
                f"{self.root}: slurmctld isn't running; run `python -m tools.slurm_box up --root {self.root}`"
            )
        return plan

    def _cabled(self, name: str) -> Node:
        plan = self._running()
        node = plan.node(name)
        if not plan.spec.netns:
            raise UserError(f"{self.root}: its nodes share the host's network; expected a box started with --netns")
        if self._daemon(_node_daemon(name)) is None:
            raise UserError(f"node {name} is off, so it has no cable; run `start {name}` first")
        return node

    def _start_missing(self, plan: Plan, deadline: Deadline) -> None:
        started = []
        for name in _daemon_names(plan):
            if self._daemon(name) is None:
                self._start(plan, name, deadline)
                started.append(name)
        self._await_nodes(plan.nodes, deadline)
        self.started = tuple(started)

    def _start(self, plan: Plan, name: str, deadline: Deadline) -> None:
        log, environ = self.root / "log" / f"{name}.out", self.env()
        if name == "munged":
            self._start_munged(plan, environ, log, deadline)
        elif name == "mariadbd":
            write_record(self._record(name), accounting.start_database(plan, environ, deadline))
        elif name == "slurmdbd":
            write_record(self._record(name), accounting.start_slurmdbd(plan, environ))
            accounting.register_cluster(plan, environ, deadline)
        elif name == "slurmctld":
            if plan.spec.netns:
                namespaces.create_bridge(plan)
            process = spawn([find_binary("slurmctld"), "-D"], environ, log)
            write_record(self._record(name), process)
            self._await_listener(name, process, plan.base_port, log, deadline)
        else:
            self._start_node(plan, plan.node(name.removeprefix("node-")), deadline)

    def _start_munged(self, plan: Plan, environ: dict[str, str], log: Path, deadline: Deadline) -> None:
        folder = self.root / "munge"
        options = [
            f"--socket={plan.munge_socket}",
            f"--key-file={folder}/munge.key",
            f"--log-file={folder}/munged.log",
            f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munged.seed",
            "--num-threads=2",
        ]
        plan.munge_socket.unlink(missing_ok=True)
        process = spawn([find_binary("munged"), "--foreground", *options], environ, log)
        write_record(self._record("munged"), process)

        def ready() -> bool:
            _expect_alive("munged", process, log)
            return _connects(socket.AF_UNIX, str(plan.munge_socket))

        wait_until(ready, deadline)

    def _start_node(self, plan: Plan, node: Node, deadline: Deadline) -> None:
        # PMIX_HOSTNAME: with two nodes on a host, a PMIx server would otherwise find no peers under the node's name.
        environ = self.env() | {"PMIX_HOSTNAME": node.name}
        log = self.root / "log" / f"{_node_daemon(node.name)}.out"
        if plan.spec.netns:
            process = namespaces.start_host(plan, node, environ, log, deadline)
        else:
            process = spawn([find_binary("slurmd"), "-D", "-N", node.name], environ, log)
        write_record(self._record(_node_daemon(node.name)), process)

    def _await_listener(self, name: str, process: Process, port: int, log: Path, deadline: Deadline) -> None:
        def listens() -> bool:
            _expect_alive(name, process, log)
            return _connects(socket.AF_INET, ("127.0.0.1", port))

        wait_until(listens, deadline)

    def _await_nodes(self, nodes: tuple[Node, ...] | list[Node], deadline: Deadline) -> None:
        """Until Slurm may use each node, or an operator has drained it."""
        while True:
            for node in nodes:
                name = _node_daemon(node.name)
                process = self._daemon(name)
                if process is None:
                    raise UserError(f"{name} ended at its start: {_last_line(self.root / 'log' / f'{name}.out')}")
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
                        env=self.env(),
                        capture_output=True,
                        timeout=10,
                        stdin=subprocess.DEVNULL,
                    )
                if deadline.expired:
                    return
                time.sleep(0.1)
        except (UserError, DeadlineExpired, subprocess.TimeoutExpired):
            return  # slurmctld doesn't answer: it is about to be ended anyway


def _daemon_names(plan: Plan) -> list[str]:
    """In the order of their start."""
    database = ["mariadbd", "slurmdbd"] if plan.spec.accounting else []
    return ["munged", *database, "slurmctld", *(_node_daemon(node.name) for node in plan.nodes)]


def _node_daemon(node: str) -> str:
    return f"node-{node}"


def _plan(root: Path, spec: BoxSpec, *, base_port: int, slot: int) -> Plan:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise UserError(f"uid {os.getuid()} has no name in /etc/passwd; expected a user that Slurm can name") from error
    host = socket.gethostname().partition(".")[0]
    return Plan(spec=spec, root=root, user=user, host=host, base_port=base_port, slot=slot)


def _publish(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.chmod(0o644)
    temporary.replace(path)


def _usable(state: str) -> bool:
    return state.rstrip("#~$@^-") in ("idle", "mixed", "allocated", "completing", "draining", "drained", "reserved")


def _expect_alive(name: str, process: Process, log: Path) -> None:
    if not process.alive:
        raise UserError(f"{name} ended at its start: {_last_line(log)}")


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    telling = [line for line in lines if "fatal" in line or "error" in line.lower()] or lines
    return f"{telling[-1] if telling else 'nothing logged'} (see {log})"


def _connects(family: int, address: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(address)
        except OSError:
            return False
        return True


@contextmanager
def _host_lock(deadline: Deadline) -> Iterator[None]:
    """One search for free ports at a time on this host, whoever runs it. No file: the kernel frees it with its holder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        while True:
            try:
                holder.bind(_HOST_LOCK)
                break
            except OSError:
                deadline.check()
                time.sleep(0.05)
        yield


def _free_ports(count: int) -> int:
    """First base of enough whole blocks in which nothing listens.

    Whole blocks, so that a box whose node is off for a while doesn't lose that node's port to another box.
    """
    span = -(-count // PORT_BLOCK) * PORT_BLOCK
    for base in range(_FIRST_PORT, _LAST_PORT - span, PORT_BLOCK):
        if all(_free(port) for port in range(base, base + span)):
            return base
    raise UserError(f"no {span} free ports in a row from {_FIRST_PORT} to {_LAST_PORT}; end another box first")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True
