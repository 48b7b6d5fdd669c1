"""The folder of a box: whose it is, its lock, its files; and the host's ports, which all boxes share.

    box.json           what was built: spec, ports, slot; makes the folder ours
    slurm.conf ...     rendered by plan.py
    munge/ db/         key, sockets, database
    state/ spool/ tmp/ of slurmctld, and per node
    run/               one record per daemon: pid, start time, boot
    log/               of every daemon, and jobcomp.log: the history

Two locks: a file lock in the folder for `up`, `down` and faults of one box, and an abstract unix socket for the search
of free ports among all boxes of the host. Both end with the process that holds them.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import UserError
from tools.slurm_box import accounting, faults, namespaces
from tools.slurm_box.plan import PORT_BLOCK, BoxSpec, Plan, max_root_length, ports_needed
from tools.slurm_box.processes import find_binary

__all__ = ["check", "claim", "host_lock", "load", "lock", "prepare"]

_FIRST_PORT, _LAST_PORT = 20480, 32768  # below Linux's default range for outgoing connections
_HOST_LOCK = "\0miles-hpc.slurm-box"
_FOLDERS = ("munge", "state", "spool", "tmp", "run", "log", "dev")


def load(root: Path) -> Plan | None:
    """The plan of the box in this folder; None when there is none. Raises UserError when it isn't ours."""
    path = root / "box.json"
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        spec = BoxSpec.from_json(data["spec"])
        uid, home = int(data["uid"]), str(data["root"])
        plan = _plan(
            root, spec, base_port=data["base_port"], slot=data["slot"], first_job_id=data.get("first_job_id", 1)
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise UserError(f"{path}: not readable; expected a box of your own: use another --root") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a box of this version ({error!r}); remove {root}") from error
    if uid != os.getuid() or home != str(root):
        raise UserError(
            f"{root} belongs to another box (uid {uid}, root {home}); expected uid {os.getuid()}: use another --root"
        )
    return plan


def check(root: Path, spec: BoxSpec) -> None:
    """What must hold before anything is written; raises UserError for the first thing that is missing."""
    for name in ("slurmctld", "slurmd", "munged", "sinfo"):
        find_binary(name)
    if spec.netns:
        namespaces.require_root("--netns")
        for name in ("ip", "unshare", "bash"):
            find_binary(name)
    if spec.accounting:
        for name in accounting.PROGRAMS:
            find_binary(name)
    length, limit = len(os.fsencode(root)), max_root_length(spec)
    if length > limit:
        raise UserError(
            f"--root {root}: {length} bytes; expected {limit} at most, for unix sockets below it: use a shorter path"
        )
    if any(c.isspace() or c in '#%,"' for c in str(root)):
        raise UserError(f"--root {str(root)!r}: expected a path without spaces, #, %, comma and quotes")


def claim(root: Path) -> None:
    """Make the folder ours, or refuse it with a UserError; a refused folder is left as it was."""
    _check_entrance(root)
    try:
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        owner = root.stat().st_uid
    except OSError as error:
        raise UserError(f"--root {root}: {error.strerror}; expected a folder that can be created here") from error
    if owner != os.getuid() or not os.access(root, os.W_OK | os.X_OK):
        raise UserError(f"--root {root}: owned by uid {owner}, not writable as yours; expected a folder of your own")
    if not (root / "box.json").exists() and any(entry.name != "box.lock" for entry in root.iterdir()):
        raise UserError(f"--root {root}: holds other files and no box; expected an empty or new folder")
    root.chmod(0o755)
    _check_entrance(root)


def _check_entrance(root: Path) -> None:
    """munged refuses a socket below a folder that others can't enter, or where others could replace it."""
    for above in root.parents:
        if not above.exists():
            continue
        status = above.stat()
        if not status.st_mode & 0o001:
            raise UserError(f"--root {root}: others can't enter {above}; expected o+x on each folder above, for munged")
        writable = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if writable or status.st_uid not in (0, os.getuid()):
            raise UserError(f"--root {root}: others may write to {above}; munged expects it yours, root's or sticky")


@contextmanager
def lock(root: Path, deadline: Deadline) -> Iterator[None]:
    """Hold the box's lock: one `up`, `down` or fault at a time."""
    fd = os.open(root / "box.lock", os.O_RDWR | os.O_CREAT, 0o600)
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


def prepare(root: Path, spec: BoxSpec, stored: Plan | None) -> Plan:
    """Choose ports and slot, write every file. Call under both locks, with no daemon running."""
    faults.kill_leftovers(root)
    if stored is not None:
        if stored.spec.netns:
            namespaces.remove_bridge(stored)
        if stored.spec != spec:
            for name in ("state", "spool", "tmp", "db"):
                shutil.rmtree(root / name, ignore_errors=True)
            stored.history_file.unlink(missing_ok=True)
    slot = namespaces.free_slot() if spec.netns else 0
    same = stored is not None and stored.spec == spec
    first_job_id = stored.first_job_id if same and stored else 1000 + 1000 * secrets.randbelow(60_000)  # < MaxJobId
    plan = _plan(root, spec, base_port=_free_ports(ports_needed(spec)), slot=slot, first_job_id=first_job_id)
    mark = {"spec": spec.to_json(), "uid": os.getuid(), "root": str(root), "base_port": plan.base_port, "slot": slot}
    mark["first_job_id"] = first_job_id
    _publish(root / "box.json", json.dumps(mark, indent=1))
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


def _plan(root: Path, spec: BoxSpec, *, base_port: int, slot: int, first_job_id: int) -> Plan:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError as error:
        raise UserError(f"uid {os.getuid()} has no name in /etc/passwd; expected a user that Slurm can name") from error
    host = socket.gethostname().partition(".")[0]
    return Plan(spec=spec, root=root, user=user, host=host, base_port=base_port, slot=slot, first_job_id=first_job_id)


def _publish(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.chmod(0o644)
    temporary.replace(path)


@contextmanager
def host_lock(deadline: Deadline) -> Iterator[None]:
    """One search for free ports at a time on this host, whoever runs it; the kernel frees it with its holder."""
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
