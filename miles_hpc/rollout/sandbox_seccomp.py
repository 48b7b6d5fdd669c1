"""The system calls that a sandbox may not make: a seccomp filter, made here as the kernel's classic BPF.

    build_filter("x86_64") ─▶ bytes ─▶ prctl(2) PR_SET_SECCOMP (kind unshare), bwrap --seccomp (kind bubblewrap)

Namespaces and missing capabilities bound what a sandbox owns; some of the kernel's doors ask for neither:

| what | why it is shut | answer |
|---|---|---|
| keyctl, add_key, request_key | a session keyring is inherited over all namespaces | EPERM |
| sockets but Unix, IP, netlink | AF_VSOCK reaches a virtual machine's host from any network namespace | EAFNOSUPPORT |
| io_uring | does opens, connects and sends that no filter sees | EPERM |
| bpf, perf_event_open, userfaultfd | tools of attacks on the kernel | EPERM |
| new namespaces, mounts, setns | capabilities within them open much of the kernel; all set-up is done by then | EPERM |
| syslog | the node's kernel log, where the site lets everybody read it | EPERM |
| open_by_handle_at, kexec, modules | need capabilities that a sandbox hasn't; shut all the same | EPERM |
| clone3 | its flags are in memory, where a filter can't look; C libraries then take clone | ENOSYS |
| another architecture's calls | have other numbers | the process is killed (SIGSYS) |

Format: seccomp(2), linux/filter.h, linux/seccomp.h, linux/audit.h. Numbers: arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h (aarch64) of Linux; from 424 on they are the same everywhere.
"""

from __future__ import annotations

import errno
import struct

__all__ = ["DENIED", "FAMILIES", "build_filter"]

# Those of 424 and above are in both columns of the kernel's tables with the same number.
_NEW = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "open_tree_attr": 467,
}
#: machine (uname -m) -> call -> number: what is answered with EPERM.
DENIED = {
    "x86_64": {
        "syslog": 103,
        "pivot_root": 155,
        "mount": 165,
        "umount2": 166,
        "init_module": 175,
        "delete_module": 176,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "open_by_handle_at": 304,
        "setns": 308,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
        **_NEW,
    },
    "aarch64": {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "syslog": 116,
        "delete_module": 106,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "open_by_handle_at": 265,
        "setns": 268,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
        **_NEW,
    },
}
#: Address families that a socket may have.
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE3 = 435
_X32 = 0x40000000  # x86-64's second set of calls, under the same architecture
_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* that clone(2) takes

# struct seccomp_data: number at 0, architecture at 4, the low half of the first argument at 16 (little-endian).
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def build_filter(machine: str) -> bytes:
    """The filter for `uname -m`: struct sock_filter, eight bytes each. Raises KeyError for one without a table."""
    denied = DENIED[machine]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        *_unless(_EQUAL, _ARCHITECTURES[machine], _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += _when(_AT_LEAST, _X32, _ERRNO | errno.ENOSYS)
    for number in denied.values():
        program += _when(_EQUAL, number, _ERRNO | errno.EPERM)
    program += _when(_EQUAL, _CLONE3, _ERRNO | errno.ENOSYS)
    program += [
        (_EQUAL, 0, 4, _CLONE[machine]),  # not clone: go on behind its four
        (_LOAD, 0, 0, _FIRST),
        *_when(_ANY_BIT, _NEW_NAMESPACES, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
        *_unless(_EQUAL, _SOCKET[machine], _ALLOW),
        (_LOAD, 0, 0, _FIRST),
    ]
    for family in FAMILIES.values():
        program += _when(_EQUAL, family, _ALLOW)
    program.append((_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _when(test: int, value: int, answer: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, answer)]


def _unless(test: int, value: int, answer: int) -> list[tuple[int, int, int, int]]:
    return [(test, 1, 0, value), (_RETURN, 0, 0, answer)]
