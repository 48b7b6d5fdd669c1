"""The kernel's calls that Python has no names for, as the sandbox launcher needs them. Stdlib only.

Each raises OSError with what was tried. Flags and calls: mount(2), clone(2), setns(2), pivot_root(2), capset(2),
prctl(2), keyctl(2), seccomp(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct

__all__ = [
    "become_dumpable",
    "check_machine",
    "clone",
    "die_with_parent",
    "drop_capabilities",
    "enter_pid_namespace",
    "forget_session_keys",
    "loopback_up",
    "mount",
    "pivot_here",
    "restrict_calls",
    "unshare",
    "write",
]

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
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_KEYCTL_JOIN_SESSION_KEYRING = 1
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()
_SYSCALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "keyctl": 250},
    "aarch64": {"clone": 220, "pivot_root": 41, "keyctl": 219},
}

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None)  # keeps the interpreter's lock over a call, which a raw clone needs


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def check_machine() -> None:
    """Raises OSError when this machine's system calls aren't known here."""
    machine = os.uname().machine
    if machine not in _SYSCALLS:
        raise OSError(f"machine {machine}: sandboxes are isolated on {' and '.join(_SYSCALLS)}")


def loopback_up() -> None:
    """127.0.0.1 and ::1 of this network namespace; netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def write(path: str, text: str) -> None:
    """One write(2), as files of /proc want it."""
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mount {kind or 'bind'} {source} on {target}")


def pivot_here() -> None:
    """The current folder, a mount, becomes the root; the old root is gone."""
    _check(_libc.syscall(_SYSCALLS[os.uname().machine]["pivot_root"], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")


def unshare(namespaces: int, what: str) -> None:
    _check(_libc.unshare(namespaces), f"unshare {what}")


def enter_pid_namespace(fd: int) -> None:
    """The next fork is born in it."""
    _check(_libc.setns(fd, CLONE_NEWPID), "setns")


def clone(flags: int) -> int:
    """A raw clone: 0 in the child, else its pid; -1 when there is none. No fork handler runs in the child."""
    return _python.syscall(_SYSCALLS[os.uname().machine]["clone"], flags, 0, 0, 0, 0)


def die_with_parent(signal_number: int) -> None:
    """Get this signal when the parent ends; cleared by a change of user."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def become_dumpable() -> None:
    """A change of user makes a process undumpable, and files like /proc/self/uid_map root's."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def forget_session_keys() -> None:
    """Leave the session keyring that was inherited, which may hold the user's tickets; nothing without keyrings."""
    _libc.syscall(_SYSCALLS[os.uname().machine]["keyctl"], _KEYCTL_JOIN_SESSION_KEYRING, None, 0, 0, 0)


def drop_capabilities() -> None:
    """No capability now, and none by any execve(2) to come."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _check(_libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES), "capset")


def restrict_calls(program: bytes) -> None:
    """Put this seccomp filter (sandbox_seccomp.build_filter) on this process and all that it will start."""
    filter_ = _Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0), "seccomp filter")
