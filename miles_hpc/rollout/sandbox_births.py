"""How a sandbox is made, looked at, cleared and stopped, by kind: in namespaces of its own, or as a mere folder.

| kind | a sandbox is | its processes are killed by |
|---|---|---|
| unshare | one clone(2), three mounts, a loopback device, then bash | kill(-1) inside its PID namespace |
| bubblewrap | bwrap(1), which makes the same, then bash | likewise |
| none | a session in a new folder, no isolation | walking over /proc by session |

The root is made once (sandbox_root.py) and inherited, which keeps a sandbox cheap. A network namespace isn't: abstract
Unix sockets are names of one, and sandboxes would reach each other by them. Stdlib only, no pathlib: the process stays
small, because it forks for others.
"""

# ruff: noqa: PTH208, PTH116

from __future__ import annotations

import os
import shutil
import signal
import tempfile

from miles_hpc.rollout.sandbox_kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    clone,
    drop_capabilities,
    enter_pid_namespace,
    loopback_up,
    mount,
    restrict_calls,
    write,
)
from miles_hpc.rollout.sandbox_root import FILTER, MAX_INODES, SANDBOX_UID, SHELL

__all__ = ["Births", "FolderBirths", "NamespaceBirths"]

_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET
_WRITABLE = ("/work", "/tmp")


class Births:
    """The sandboxes of one launcher, by id. `start` closes what it is given; no call raises for a dead sandbox."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}  # sandbox id -> the process that we started
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LC_ALL": "C", "TERM": "dumb"}
        self._null = os.open("/dev/null", os.O_RDWR)

    def start(self, sandbox: str, control: int, output: int) -> None:
        """Begin it; that it couldn't is seen by the end of its control socket."""
        raise NotImplementedError

    def look(self, sandbox: str) -> tuple[int, bool]:
        """Tasks of the sandbox (processes and their threads; 0: unknown), and whether one of its folders is full."""
        raise NotImplementedError

    def clear(self, sandbox: str) -> None:
        """Kill every process in it but its PID 1."""
        raise NotImplementedError

    def stop(self, sandbox: str) -> None:
        """Kill it."""
        raise NotImplementedError

    def reap(self) -> bool:
        """Take note of what has ended; whether a child is left."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for sandbox, started in self.pids.items():
                if started == pid:
                    del self.pids[sandbox]
                    break

    def end(self) -> None:
        """The host is gone."""

    def _spawn(
        self, sandbox: str, command: list[str], fds: tuple[int, int], *, rules: str = "", setsid: bool = False
    ) -> None:
        control, output = fds
        places = ((self._null, 0), (self._null, 1), (self._null, 2), (control, 3), (output, 4))
        actions: list[tuple[object, ...]] = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in places]
        if rules:
            actions.append((os.POSIX_SPAWN_OPEN, 5, rules, os.O_RDONLY, 0))
        try:
            self.pids[sandbox] = os.posix_spawn(
                command[0], command, self.environment, file_actions=actions, setsid=setsid
            )
        except OSError:
            pass
        finally:
            os.close(control)
            os.close(output)


class NamespaceBirths(Births):
    """Kinds unshare and bubblewrap: each sandbox is PID 1 of its own namespaces, under a seccomp filter.

    `bwrap` is the program's path, or empty for kind unshare. `size` is of /work and of /tmp, bytes.
    """

    def __init__(self, driver: str, bwrap: str, size: str, rules: bytes) -> None:
        super().__init__()
        self._rules = rules
        self._size = size
        self._bwrapped = bool(bwrap)
        self._shell = [SHELL, "--noprofile", "--norc", "-c", driver, "bash"]
        # fmt: off
        self._bwrap = [
            bwrap, "--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID),
            "--cap-drop", "ALL", "--unshare-pid", "--unshare-ipc", "--unshare-net",
            "--dev-bind", "/", "/", "--proc", "/proc",
            "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/work", "--seccomp", "5",
            "--die-with-parent", "--as-pid-1", "--new-session", "--chdir", "/work", *self._shell,
        ]
        # fmt: on

    def start(self, sandbox: str, control: int, output: int) -> None:
        if self._bwrapped:
            self._spawn(sandbox, self._bwrap, (control, output), rules=FILTER)
            return
        # One raw clone instead of unshare and fork: the child is PID 1 of its namespaces at once. It calls
        # nothing that needs what fork handlers would have repaired.
        pid = clone(_NAMESPACES | signal.SIGCHLD)
        if pid == 0:
            self._become_sandbox(control, output)
        if pid > 0:
            self.pids[sandbox] = pid
        os.close(control)
        os.close(output)

    def _become_sandbox(self, control: int, output: int) -> None:
        """In the new process: finish its namespaces, give up every privilege, execute the shell. Never returns."""
        try:
            write("/proc/self/setgroups", "deny")
            write("/proc/self/uid_map", f"{SANDBOX_UID} 0 1")
            write("/proc/self/gid_map", f"{SANDBOX_UID} 0 1")
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
            write("/proc/sys/user/max_user_namespaces", "0")  # no further ones, and no capabilities inside of them
            for folder in _WRITABLE:
                options = f"size={self._size},nr_inodes={MAX_INODES},mode=755,uid={SANDBOX_UID},gid={SANDBOX_UID}"
                mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
            loopback_up()
            os.chdir("/work")
            os.setsid()
            for fd, place in ((self._null, 0), (self._null, 1), (self._null, 2), (control, 3), (output, 4)):
                os.dup2(fd, place)
            drop_capabilities()
            restrict_calls(self._rules)
            os.execve(self._shell[0], self._shell, self.environment)
        finally:
            os._exit(1)

    def look(self, sandbox: str) -> tuple[int, bool]:
        root = f"/proc/{self._inner(sandbox)}/root"
        tasks = 0
        try:
            full = False
            for folder in _WRITABLE:  # mounts in a root that is read-only: no command can put something else there
                room = os.statvfs(root + folder)
                full = full or room.f_bavail == 0 or (room.f_files > 0 and room.f_favail == 0)
            for name in os.listdir(f"{root}/proc"):
                if name.isdigit():
                    try:
                        tasks += os.stat(f"{root}/proc/{name}/task").st_nlink - 2  # folders in it: one per thread
                    except OSError:  # it has ended meanwhile
                        continue
        except OSError:  # the sandbox has
            return 0, False
        return tasks, full

    def _inner(self, sandbox: str) -> int | None:
        """The sandbox's PID 1, as numbered here."""
        pid = self.pids.get(sandbox)
        if pid is None or not self._bwrapped:
            return pid
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                children = file.read().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def clear(self, sandbox: str) -> None:
        # From inside the sandbox's PID namespace, kill(-1) reaches everything but its PID 1, fork bombs included.
        pid = self._inner(sandbox)
        if pid is None:
            return
        helper = os.fork()
        if helper == 0:
            try:
                enter_pid_namespace(os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY))
                killer = os.fork()
                if killer == 0:
                    os.kill(-1, signal.SIGKILL)
                    os._exit(0)
                os.waitpid(killer, 0)
            finally:
                os._exit(0)
        os.waitpid(helper, 0)

    def stop(self, sandbox: str) -> None:
        for pid in {self._inner(sandbox), self.pids.get(sandbox)}:
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


class FolderBirths(Births):
    """Kind none: a session and a folder per sandbox, no namespaces."""

    def __init__(self, driver: str) -> None:
        super().__init__()
        self._command = ["/bin/bash", "--noprofile", "--norc", "-c", f'cd "$HOME" || exit 9\n{driver}', "bash"]
        self._common = self.environment
        self._folders: dict[str, str] = {}

    def start(self, sandbox: str, control: int, output: int) -> None:
        try:
            folder = tempfile.mkdtemp(prefix="sandbox-")
        except OSError:
            os.close(control)
            os.close(output)
            return
        self._folders[sandbox] = folder
        self.environment = {**self._common, "HOME": folder, "TMPDIR": folder}
        self._spawn(sandbox, self._command, (control, output), setsid=True)

    def look(self, sandbox: str) -> tuple[int, bool]:
        return 0, False  # its user's processes and its file system aren't the sandbox's own

    def clear(self, sandbox: str) -> None:
        leader = self.pids.get(sandbox)
        if leader is not None:
            _kill_sessions({leader}, spare_leaders=True)

    def stop(self, sandbox: str) -> None:
        leader = self.pids.get(sandbox)
        if leader is not None:
            _kill_sessions({leader})

    def reap(self) -> bool:
        before = dict(self.pids)
        children = super().reap()
        ended = [sandbox for sandbox in before if sandbox not in self.pids]
        if ended:
            _kill_sessions({before[sandbox] for sandbox in ended})
            for sandbox in ended:
                shutil.rmtree(self._folders.pop(sandbox), ignore_errors=True)
        return children

    def end(self) -> None:
        _kill_sessions(set(self.pids.values()))
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _kill_sessions(leaders: set[int], *, spare_leaders: bool = False) -> None:
    """Kill all processes of these sessions; looks again while it finds some, since they may have forked meanwhile."""
    for _ in range(20):
        found = 0
        for name in os.listdir("/proc"):
            if not name.isdigit() or (spare_leaders and int(name) in leaders):
                continue
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                # proc(5), stat: field 3 is the state, field 6 the session.
                if int(fields[3]) in leaders and fields[0] not in "ZX":
                    os.kill(int(name), signal.SIGKILL)
                    found += 1
            except OSError:
                continue
        if not found:
            return
