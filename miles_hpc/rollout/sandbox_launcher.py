"""The sandbox launcher: one small process per sandbox host that starts sandboxes and ends them.

Run as a program (`python -I -S -E sandbox_launcher.py ...`), stdlib only, so that it forks cheaply. It enters its own
user, network, mount, PID, IPC and UTS namespaces once, and a read-only root; every sandbox is born inside them:

    sandbox host (asyncio)                       network, the run directory, secrets
      └─ launcher, outer half                    waits; dies with the host
          └─ launcher, PID 1 of its namespaces   no network, read-only root; ends every sandbox when it ends
              └─ sandbox: bash                   PID 1 of its own namespaces, no capabilities, own /work, /tmp, /proc
                  └─ commands, each in a subshell of that bash

Because network namespace and root are made once and inherited, a sandbox costs one clone(2) and three mounts. Kind
`unshare` makes it by those calls alone, `bubblewrap` lets bwrap(1) do it; kind `none` has no namespaces, only folders.

Protocol: datagrams over a SOCK_SEQPACKET pair, text, fields separated by a blank:

    start ID    + 2 fds: the sandbox's control socket and the write end of its output pipe
    clear ID    kill every process in the sandbox but its PID 1
    stop ID     kill the sandbox
    ready KIND / failed TEXT   the launcher's answer, once, at the start
    cleared                    its answer to each clear, when the processes have been killed

That a sandbox has ended, or couldn't begin, is seen by its control socket's end of file. Flags and calls: unshare(2),
clone(2), setns(2), pivot_root(2), capset(2), prctl(2), user_namespaces(7), pid_namespaces(7).
"""

# ruff: noqa: PTH101, PTH102, PTH112, PTH114, PTH115, PTH208, PTH211, PTH113
# No pathlib here: the process stays small, because it forks for others.

import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile

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
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

#: The unprivileged user that the launcher becomes when it is started by root.
NOBODY = 65534
#: The user as the sandbox sees it.
SANDBOX_UID = 1000
#: Files of /work and of /tmp (kind unshare).
MAX_INODES = 4096
#: Where what belongs to a terminal task and not to its working folder lies; /tests and /logs are links into it.
TASK_FOLDER = "/tmp/.task"
#: Paths that terminal tasks take for granted (environments/terminal_task.py), in the sandboxes' root.
LINKS = {
    "app": "work",
    "testbed": "work",
    "workspace": "work",
    "logs": "tmp/.task/logs",
    "tests": "tmp/.task/tests",
}

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None)  # keeps the interpreter's lock over a call, which a raw clone needs
_SANDBOX_NAMESPACES = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC
_SYSCALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155},
    "aarch64": {"clone": 220, "pivot_root": 41},
}.get(os.uname().machine, {})
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()


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


def _build_root(shell: str) -> None:
    """Make and enter the root that sandboxes share, read-only: /usr, minimal /dev and /etc, no host path else."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=8m,mode=755")
    for folder in ("usr", "dev", "proc", "tmp", "work", "etc", "run"):
        os.mkdir(f"{root}/{folder}")
    for name, target in LINKS.items():
        os.symlink(target, f"{root}/{name}")
    folders = ["usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):  # merged /usr
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            folders.append(name)
    if os.path.isdir("/etc/alternatives"):  # Debian's links to the real programs go through it
        os.mkdir(f"{root}/etc/alternatives")
        folders.append("etc/alternatives")
    for name in folders:
        _mount(f"/{name}", f"{root}/{name}", "", MS_BIND | MS_REC)
        _mount("none", f"{root}/{name}", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    with open(f"{root}/etc/passwd", "w") as file:
        file.write(f"user:x:{SANDBOX_UID}:{SANDBOX_UID}:user:/work:/bin/bash\n")
    if os.path.isfile("/etc/ld.so.cache"):  # without it every program searches its libraries folder by folder
        with open("/etc/ld.so.cache", "rb") as source, open(f"{root}/etc/ld.so.cache", "wb") as file:
            file.write(source.read())
    for device in ("null", "zero", "full", "urandom"):
        with open(f"{root}/dev/{device}", "w"):
            pass
        _mount(f"/dev/{device}", f"{root}/dev/{device}", "", MS_BIND)
    os.symlink("urandom", f"{root}/dev/random")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    # A sandbox's PID 1 runs from a copy that may be executed but not read: the kernel makes such a process undumpable
    # (execve(2), prctl(2) PR_SET_DUMPABLE), so nothing in the sandbox can trace it or open its descriptors. This needs
    # that it has no capability when it executes the copy, and that the copy's mode can't be changed.
    with open(shell, "rb") as file:
        program = file.read()
    with open(f"{root}/run/shell", "wb") as file:
        file.write(program)
    os.chmod(f"{root}/run/shell", 0o111)
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("none", root, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID)
    os.chdir(root)
    _check(_libc.syscall(_SYSCALLS["pivot_root"], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount the old root")
    os.chdir("/")


class _Launcher:
    """Starts, clears and stops sandboxes of kind unshare or bubblewrap."""

    def __init__(self, channel: socket.socket, kind: str, driver: str, bwrap: str, size: str) -> None:
        self.channel = channel
        self.pids: dict[str, int] = {}  # sandbox id -> the process that we started
        self.bwrapped = kind == "bubblewrap"
        self.size = size
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/work", "LC_ALL": "C", "TERM": "dumb"}
        self.shell = ["/run/shell", "--noprofile", "--norc", "-c", driver, "bash"]
        # fmt: off
        self.bwrap = [
            bwrap, "--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID),
            "--cap-drop", "ALL", "--unshare-pid", "--unshare-ipc",
            "--dev-bind", "/", "/", "--proc", "/proc",
            "--size", size, "--tmpfs", "/tmp", "--size", size, "--tmpfs", "/work",
            "--die-with-parent", "--as-pid-1", "--new-session", "--chdir", "/work", *self.shell,
        ]
        # fmt: on
        self.null = os.open("/dev/null", os.O_RDWR)

    def serve(self) -> None:
        """Until the host's end closes."""
        poller = select.poll()  # not select(2), which ends at descriptor 1023: the host may have more
        poller.register(self.channel, select.POLLIN)
        children = False
        while True:
            # Not only while there are sandboxes: bwrap may be killed and reaped before its child, which is ours then.
            if poller.poll(1_000 if children else 30_000):
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
                    self.channel.send(b"cleared")
                elif verb == "stop":
                    self.stop(sandbox)
            children = self.reap()

    def start(self, sandbox: str, fds: list[int]) -> None:
        control, output = fds
        try:
            if self.bwrapped:
                places = ((self.null, 0), (self.null, 1), (self.null, 2), (control, 3), (output, 4))
                actions = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in places]
                self.pids[sandbox] = os.posix_spawn(self.bwrap[0], self.bwrap, self.environment, file_actions=actions)
            else:
                # One raw clone instead of unshare and fork: the child is PID 1 of its namespaces at once. It calls
                # nothing that needs what fork handlers would have repaired.
                pid = _python.syscall(_SYSCALLS["clone"], _SANDBOX_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
                if pid == 0:
                    self.become_sandbox(control, output)
                if pid > 0:
                    self.pids[sandbox] = pid
        except OSError:
            pass  # no process to spawn; the host sees the end of the control socket
        finally:
            os.close(control)
            os.close(output)

    def become_sandbox(self, control: int, output: int) -> None:
        """In the new process: finish its namespaces, give up every privilege, execute the shell. Never returns."""
        try:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{SANDBOX_UID} 0 1")
            _write("/proc/self/gid_map", f"{SANDBOX_UID} 0 1")
            _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
            _write("/proc/sys/user/max_user_namespaces", "0")  # no further ones, and no capabilities inside of them
            for folder in ("/work", "/tmp"):
                options = f"size={self.size},nr_inodes={MAX_INODES},mode=755,uid={SANDBOX_UID},gid={SANDBOX_UID}"
                _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
            os.chdir("/work")
            os.setsid()
            for fd, place in ((self.null, 0), (self.null, 1), (self.null, 2), (control, 3), (output, 4)):
                os.dup2(fd, place)
            _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
            _check(_libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")
            os.execve(self.shell[0], self.shell, self.environment)
        finally:
            os._exit(1)

    def inner(self, sandbox: str) -> int | None:
        """The sandbox's PID 1, as numbered here."""
        pid = self.pids.get(sandbox)
        if pid is None or not self.bwrapped:
            return pid
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
            finally:
                os._exit(0)
        os.waitpid(helper, 0)

    def stop(self, sandbox: str) -> None:
        for pid in {self.inner(sandbox), self.pids.get(sandbox)}:
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

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


class _Folders(_Launcher):
    """Kind none: a session and a folder per sandbox, no namespaces."""

    def __init__(self, channel: socket.socket, kind: str, driver: str, bwrap: str, size: str) -> None:
        super().__init__(channel, kind, driver, bwrap, size)
        self.folders: dict[str, str] = {}
        self.driver = driver

    def start(self, sandbox: str, fds: list[int]) -> None:
        control, output = fds
        folder = tempfile.mkdtemp(prefix="sandbox-")
        self.folders[sandbox] = folder
        environment = {**self.environment, "HOME": folder, "TMPDIR": folder}
        command = ["/bin/bash", "--noprofile", "--norc", "-c", f'cd "$HOME" || exit 9\n{self.driver}', "bash"]
        places = ((self.null, 0), (self.null, 1), (self.null, 2), (control, 3), (output, 4))
        actions = [(os.POSIX_SPAWN_DUP2, fd, place) for fd, place in places]
        try:
            self.pids[sandbox] = os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True)
        except OSError:
            pass  # as above
        finally:
            os.close(control)
            os.close(output)

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
                shutil.rmtree(self.folders.pop(sandbox), ignore_errors=True)
        return children

    def end(self) -> None:
        """The host is gone: so are the sandboxes."""
        _kill_sessions(set(self.pids.values()))
        for folder in self.folders.values():
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
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    if kind == "none":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        folders = _Folders(channel, kind, driver, bwrap, size)
        channel.send(f"ready {kind}".encode())
        try:
            folders.serve()
        except (ConnectionResetError, BrokenPipeError):
            pass
        finally:
            folders.end()
        return 0
    try:
        _enter_namespaces()
        child = os.fork()
        if child:
            channel.close()
            _, status = os.waitpid(child, 0)
            return os.waitstatus_to_exitcode(status)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        socket.sethostname("sandbox")
        _build_root("/bin/bash")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except OSError as error:
        channel.send(f"failed {error}".encode())
        return 1
    channel.send(f"ready {kind}".encode())
    try:
        _Launcher(channel, kind, driver, bwrap, size).serve()
    except (ConnectionResetError, BrokenPipeError):
        pass  # the host is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
