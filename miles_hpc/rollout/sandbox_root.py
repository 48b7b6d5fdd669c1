"""Where sandboxes are born: the launcher's own namespaces, and the read-only root that a host's sandboxes share.

    enter_namespaces ─▶ fork ─▶ build_root, which makes it the root        from then on sandboxes are made in it

Stdlib only, no pathlib: the process stays small, because it forks for others.
"""

# ruff: noqa: PTH101, PTH102, PTH112, PTH114, PTH115, PTH211, PTH113

from __future__ import annotations

import os
import signal

from miles_hpc.rollout.sandbox_kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    become_dumpable,
    die_with_parent,
    forget_session_keys,
    mount,
    pivot_here,
    unshare,
    write,
)

__all__ = [
    "FILTER",
    "LINKS",
    "MAX_INODES",
    "NOBODY",
    "SANDBOX_UID",
    "SHELL",
    "TASK_FOLDER",
    "becomes_nobody",
    "build_root",
    "enter_namespaces",
]

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
#: In that root: what PID 1 of a sandbox executes, and the seccomp filter that bwrap reads.
SHELL = "/run/shell"
FILTER = "/run/filter"


def becomes_nobody() -> bool:
    """Whether the launcher gives up being root: not where it is root of a user namespace that knows nobody else.

    That one is an ordinary user for the kernel, and stays it.
    """
    return os.getuid() == 0 and all(_is_mapped(f"/proc/self/{kind}_map") for kind in ("uid", "gid"))


def _is_mapped(path: str) -> bool:
    """user_namespaces(7): lines of first id inside, first id outside, how many."""
    with open(path) as file:
        ranges = [[int(part) for part in line.split()] for line in file]
    return any(first <= NOBODY < first + count for first, _, count in ranges)


def enter_namespaces() -> None:
    """Own user, mount, network, IPC, UTS namespaces, and a PID namespace for the next fork. Raises OSError."""
    die_with_parent(signal.SIGKILL)
    forget_session_keys()
    if becomes_nobody():
        # Root is exempt from the process limit (setrlimit(2), RLIMIT_NPROC), also as a namespace's mapping of it.
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        become_dumpable()
        die_with_parent(signal.SIGKILL)
    uid, gid = os.getuid(), os.getgid()
    namespaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    unshare(namespaces, "user, mount, network, IPC, UTS and PID namespaces")
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"0 {uid} 1")
    write("/proc/self/gid_map", f"0 {gid} 1")


def build_root(shell: str, seccomp_filter: bytes) -> None:
    """Make and enter the root that sandboxes share, read-only: /usr, minimal /dev and /etc, no host path else."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    root = "/tmp"
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "size=8m,mode=755")
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
        mount(f"/{name}", f"{root}/{name}", "", MS_BIND | MS_REC)
        mount("none", f"{root}/{name}", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    with open(f"{root}/etc/passwd", "w") as file:
        file.write(f"user:x:{SANDBOX_UID}:{SANDBOX_UID}:user:/work:/bin/bash\n")
    if os.path.isfile("/etc/ld.so.cache"):  # without it every program searches its libraries folder by folder
        with open("/etc/ld.so.cache", "rb") as source, open(f"{root}/etc/ld.so.cache", "wb") as cache:
            cache.write(source.read())
    for device in ("null", "zero", "full", "urandom"):
        with open(f"{root}/dev/{device}", "w"):
            pass
        mount(f"/dev/{device}", f"{root}/dev/{device}", "", MS_BIND)
    os.symlink("urandom", f"{root}/dev/random")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")
    # A sandbox's PID 1 runs from a copy that may be executed but not read: the kernel makes such a process undumpable
    # (execve(2), prctl(2) PR_SET_DUMPABLE), so nothing in the sandbox can trace it or open its descriptors. This needs
    # that it has no capability when it executes the copy, and that the copy's mode can't be changed.
    with open(shell, "rb") as source, open(f"{root}{SHELL}", "wb") as copy:
        copy.write(source.read())
    os.chmod(f"{root}{SHELL}", 0o111)
    with open(f"{root}{FILTER}", "wb") as rules:
        rules.write(seccomp_filter)
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount("none", root, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID)
    os.chdir(root)
    pivot_here()
