"""The sandbox launcher: one small process per sandbox host that starts sandboxes and ends them.

Run as a program (`python -I -S -E sandbox_launcher.py ...`), stdlib only, so that it forks cheaply. It enters its own
user, network, mount, PID and IPC namespaces once; every sandbox is born inside them:

    sandbox host (asyncio)                       network, the run directory, secrets
      └─ launcher, outer half                    waits; dies with the host
          └─ launcher, PID 1 of its namespaces   no network; ends every sandbox when it ends
              └─ sandbox: bubblewrap ─▶ bash     PID 1 of its own namespaces, read-only root, no capabilities
                  └─ commands, each in a subshell of that bash

Because the network namespace is made once and inherited, no sandbox pays for one.

Protocol: datagrams over a SOCK_SEQPACKET pair (fd given by --fd), text, fields separated by a blank:

    start ID    + 2 fds: the sandbox's control socket and the write end of its output pipe
    clear ID    kill every process in the sandbox but its PID 1
    stop ID     kill the sandbox
    ready KIND / failed TEXT   the launcher's only answers, once, at the start

That a sandbox has ended is seen by its control socket's end of file. Flags and calls: unshare(2), setns(2),
user_namespaces(7), pid_namespaces(7), prctl(2), bwrap(1).
"""

# ruff: noqa: PTH101, PTH102, PTH112, PTH114, PTH115, PTH211
# No pathlib here: the process stays small, because it forks for others.

import ctypes
import os
import resource
import select
import signal
import socket
import sys

__all__ = ["main"]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4

#: The unprivileged user that the launcher becomes when it is started by root.
NOBODY = 65534
#: Where the launcher builds the read-only root that all sandboxes share; in its own mount namespace only.
STAGE = "/tmp"
SANDBOX_UID = 1000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mount {kind or 'bind'} {source} on {target}")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _enter_namespaces() -> None:
    """Own user, mount, network, IPC, UTS namespaces, and a PID namespace for the next fork."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getuid() == 0:
        # Root is exempt from the process limit (setrlimit(2), RLIMIT_NPROC), also as a namespace's mapping of it.
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _libc.prctl(PR_SET_DUMPABLE, 1)  # cleared by the change of user; /proc/self/uid_map belongs to root without
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # cleared by it as well
    uid, gid = os.getuid(), os.getgid()
    namespaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    _check(_libc.unshare(namespaces), "unshare user, mount, network, IPC, UTS and PID namespaces")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _build_root(shell: str) -> str:
    """The root that sandboxes share, read-only: /usr, minimal /dev, empty /proc, /tmp and /work. Returns its path."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("tmpfs", STAGE, "tmpfs", MS_NOSUID, "size=8m,mode=755")
    root = f"{STAGE}/root"
    for folder in ("", "/usr", "/dev", "/proc", "/tmp", "/work", "/etc", "/run"):
        os.mkdir(root + folder)
    _mount("/usr", f"{root}/usr", "", MS_BIND | MS_REC)
    _mount("none", f"{root}/usr", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):  # merged /usr
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            _mount(f"/{name}", f"{root}/{name}", "", MS_BIND | MS_REC)
            _mount("none", f"{root}/{name}", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    if os.path.isdir("/etc/alternatives"):  # Debian's links to the real programs go through it
        os.mkdir(f"{root}/etc/alternatives")
        _mount("/etc/alternatives", f"{root}/etc/alternatives", "", MS_BIND)
    with open(f"{root}/etc/passwd", "w") as file:
        file.write(f"user:x:{SANDBOX_UID}:{SANDBOX_UID}:user:/work:/bin/bash\n")
    for device in ("null", "zero", "full", "random", "urandom"):
        with open(f"{root}/dev/{device}", "w"):
            pass
        _mount(f"/dev/{device}", f"{root}/dev/{device}", "", MS_BIND)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    # PID 1 runs from a copy that may be executed but not read: the kernel makes such a process undumpable
    # (execve(2), prctl(2) PR_SET_DUMPABLE), so nothing in the sandbox can trace it or open its descriptors.
    with open(shell, "rb") as file:
        program = file.read()
    with open(f"{root}/run/shell", "wb") as file:
        file.write(program)
    os.chmod(f"{root}/run/shell", 0o111)
    _mount(root, root, "", MS_BIND | MS_REC)
    _mount("none", root, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID)
    return root


class _Launcher:
    def __init__(self, channel: socket.socket, kind: str, driver: str, root: str, bwrap: str, size_bytes: int) -> None:
        self.channel = channel
        self.kind = kind
        self.pids: dict[str, int] = {}  # sandbox id -> the process that we started
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LC_ALL": "C", "TERM": "dumb"}
        self.bwrap = bwrap
        size = str(size_bytes)
        # fmt: off
        self.command = [
            bwrap, "--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID),
            "--cap-drop", "ALL", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox",
            "--dev-bind", root, "/", "--proc", "/proc",
            "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/work",
            "--die-with-parent", "--as-pid-1", "--new-session", "--chdir", "/work",
            "/run/shell", "--noprofile", "--norc", "-c", driver, "bash",
        ]
        # fmt: on
        self.null = os.open("/dev/null", os.O_RDWR)

    def serve(self) -> None:
        """Until the host's end closes."""
        while True:
            readable, _, _ = select.select([self.channel], [], [], 1.0 if self.pids else 30.0)
            if readable:
                message, fds, _, _ = socket.recv_fds(self.channel, 256, 2)
                for fd in fds:
                    os.set_inheritable(fd, False)  # Python 3.11 drops the flag that would say so
                if not message:
                    return
                verb, _, sandbox = message.decode().partition(" ")
                if verb == "start":
                    self.start(sandbox, fds)
                elif verb == "clear":
                    self.clear(sandbox)
                elif verb == "stop":
                    self.stop(sandbox)
            self.reap()

    def start(self, sandbox: str, fds: list[int]) -> None:
        control, output = fds
        actions = [
            (os.POSIX_SPAWN_DUP2, self.null, 0),
            (os.POSIX_SPAWN_DUP2, self.null, 1),
            (os.POSIX_SPAWN_DUP2, self.null, 2),
            (os.POSIX_SPAWN_DUP2, control, 3),
            (os.POSIX_SPAWN_DUP2, output, 4),
        ]
        try:
            self.pids[sandbox] = os.posix_spawn(self.bwrap, self.command, self.environment, file_actions=actions)
        finally:
            os.close(control)
            os.close(output)

    def inner(self, sandbox: str) -> int | None:
        """The sandbox's PID 1, as numbered here."""
        pid = self.pids.get(sandbox)
        if pid is None:
            return None
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                children = file.read().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def clear(self, sandbox: str) -> None:
        """From inside the sandbox's PID namespace, kill(-1) reaches everything but its PID 1, fork bombs included."""
        pid = self.inner(sandbox)
        if pid is None:
            return
        helper = os.fork()
        if helper == 0:
            try:
                fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY)
                _check(_libc.setns(fd, CLONE_NEWPID), "setns")
                killer = os.fork()
                if killer == 0:
                    os.kill(-1, signal.SIGKILL)
                    os._exit(0)
                os.waitpid(killer, 0)
            except OSError:
                pass
            finally:
                os._exit(0)
        os.waitpid(helper, 0)

    def stop(self, sandbox: str) -> None:
        inner = self.inner(sandbox)
        for pid in (inner, self.pids.get(sandbox)):
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for sandbox, started in self.pids.items():
                if started == pid:
                    del self.pids[sandbox]
                    break


def main(arguments: list[str]) -> int:
    """`FD KIND DRIVER BWRAP SIZE`. Exit code 0 when the host closed the channel, 1 when isolation isn't possible."""
    fd, kind, driver, bwrap, size = arguments
    channel = socket.socket(fileno=int(fd))
    channel.set_inheritable(False)
    while True:  # keep received descriptors clear of 0..4, which sandboxes get
        low = os.open("/dev/null", os.O_RDONLY)
        if low > 4:
            os.close(low)
            break
    try:
        _enter_namespaces()
        child = os.fork()
        if child:
            channel.close()
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        root = _build_root("/bin/bash")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except OSError as error:
        channel.send(f"failed {error}".encode())
        return 1
    channel.send(f"ready {kind}".encode())
    _Launcher(channel, kind, driver, root, bwrap, int(size)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
