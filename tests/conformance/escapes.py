"""What a hostile command tries, and what it must be told: the table of test_sandbox_escapes.py.

Words in braces are things of the node that the test has put there. `says` is a regular expression of what the command
prints, in the C locale; every attempt has one, or a `limit`, or both.
"""

from __future__ import annotations

import base64
import os
import signal
import struct
from dataclasses import dataclass

from miles_hpc.core.types import SandboxLimit

__all__ = ["ESCAPES", "Escape"]

DENIED = "Operation not permitted|Permission denied"
ABSENT = "No such file or directory"
UNREACHABLE = "Network is unreachable"
KILLED, XCPU, XFSZ = (128 + number for number in (signal.SIGKILL, signal.SIGXCPU, signal.SIGXFSZ))
SYS, SEGV = 128 + signal.SIGSYS, 128 + signal.SIGSEGV  # the latter where the kernel doesn't know that architecture
X86 = os.uname().machine == "x86_64"


@dataclass(frozen=True)
class Escape:
    """One attempt. `exit_codes` empty: any but 0."""

    name: str
    command: str
    says: str = ""
    limits: tuple[SandboxLimit, ...] = (SandboxLimit.NONE,)
    exit_codes: tuple[int, ...] = ()
    timeout_s: float = 60.0
    only: str = ""  # an isolation


def call(name: str, *arguments: str) -> str:
    """A bare system call by its name in perl's own table; prints why it failed."""
    listed = ", ".join(arguments or ("0", "0", "0"))
    return (
        f'perl -e \'require "syscall.ph"; $n = &SYS_{name}; $r = syscall($n, {listed}); '
        'print $r < 0 ? "$!\\n" : "done\\n"; exit($r < 0)\''
    )


def numbered(number: int, *arguments: str) -> str:
    """A system call by number, one that is the same on every architecture."""
    listed = ", ".join(arguments)
    return f'perl -e \'$r = syscall({number}, {listed}); print $r < 0 ? "$!\\n" : "done\\n"; exit($r < 0)\''


def open_socket(family: int, kind: int, rest: str = "") -> str:
    return f"perl -MSocket -e 'socket(S, {family}, {kind}, 0) or die \"$!\\n\"; {rest}'"


def i386_call() -> str:
    """A program that makes a call of the other architecture: exit(0) by int 0x80. Format: elf(5), one segment."""
    code = b"\xb8\1\0\0\0\x31\xdb\xcd\x80"  # mov eax, 1; xor ebx, ebx; int 0x80
    start, end = 0x400000, 64 + 56
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 62, 1, start + end, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, start, start, end + len(code), end + len(code), 0x1000)
    program = base64.b64encode(header + segment + code).decode()
    return f"echo {program} | base64 -d >p; chmod +x p; ./p"


def abstract(name: str) -> str:
    """A connection to a Unix socket that has a name and no path."""
    return open_socket(1, 1, rf'connect(S, pack("S a*", 1, "\0{name}")) or die "$!\n"')


READ_THE_SECRET = (
    Escape("by its path", "cat {secret}", ABSENT),
    Escape("through a link", "ln -s {secret} l; cat l; cp -L l m; ls m", ABSENT),
    Escape("through a hard link", "ln {secret} l", ABSENT),
    Escape("environment of a process of the node", "cat /proc/{bystander}/environ", ABSENT),
    Escape("descriptors of a process of the node", "cat /proc/{bystander}/fd/*", ABSENT),
    Escape("memory of a process of the node", "head -c 9 /proc/{bystander}/mem", ABSENT),
    Escape("environment of the host process", "cat /proc/{host}/environ /proc/{launcher}/environ", ABSENT),
    Escape("all environments", "cat /proc/*/environ /proc/*/task/*/environ", "/proc/1/environ: Permission denied"),
    Escape("all descriptors", "ls /proc/[0-9]*/fd /proc/[0-9]*/task/*/fd", DENIED),
    Escape("all roots", "cat /proc/[0-9]*/root{secret} /proc/[0-9]*/cwd/../..{secret}", f"{DENIED}|{ABSENT}"),
    Escape("memory of PID 1", "head -c 9 /proc/1/mem", "Permission denied"),
    Escape("map_files of PID 1", "ls /proc/1/map_files/", "Permission denied"),
    Escape("tracing PID 1", call("ptrace", "16", "1", "0", "0"), DENIED),
    Escape("tracing the host process", call("ptrace", "16", "{host}", "0", "0"), "No such process"),
    Escape(
        "PID 1's memory by process_vm_readv",
        'perl -e \'require "syscall.ph"; $b = "x" x 64; $v = pack("pQ", $b, 64); '
        '$r = syscall(&SYS_process_vm_readv, 1, $v, 1, $v, 1, 0); die "$!\\n" if $r < 0\'',
        DENIED,
    ),
    Escape(
        "PID 1's descriptors by pidfd_getfd",
        "perl -e '$p = syscall(434, 1, 0); $r = syscall(438, $p, 3, 0); die \"$!\\n\" if $r < 0'",
        DENIED,
    ),
    Escape("a file handle", call("open_by_handle_at"), DENIED),
    Escape("the node's disk", "mknod d b 254 0 || mknod /tmp/d c 1 1 || cat /dev/mem /dev/vda /dev/sda", DENIED),
    Escape("session keyring", call("keyctl", "0", "-3", "1"), DENIED),
    Escape("a key", call("request_key"), DENIED),
    Escape("the kernel's log", "dmesg; dmesg >/dev/null || exit 1; exit 2", DENIED),
    Escape("the neighbour's folder", "cat /work/../proc/*/root/work/private", f"{DENIED}|{ABSENT}"),
    Escape("the neighbour's /tmp", "cat /tmp/private", ABSENT),
    Escape("the neighbour's socket", abstract("neighbour"), "Connection refused"),
)

WRITE_OUTSIDE = (
    Escape("a file by its path", "echo x >{outside}", ABSENT),
    Escape("a file through a link", "ln -s {outside} l; echo x >l", ABSENT),
    Escape("a folder of the node", "mkdir {outside}.d", ABSENT),
    Escape("programs", "echo x >/usr/bin/ls", "Read-only file system|Permission denied"),
    Escape("deleting programs", "rm -f /usr/bin/ls", "Read-only file system|Permission denied"),
    Escape("the root", "echo x >/x; touch /etc/x /run/x", "Read-only file system|Permission denied"),
    Escape("the shared shell", "echo x >/run/shell; chmod 755 /run/shell", "Read-only file system|Permission denied"),
    Escape("a mount", "mount -t tmpfs x /usr", "must be superuser|Operation not permitted"),
    Escape("a mount by the bare call", call("mount"), DENIED),
    Escape("mounts by the newer calls", numbered(428, "-100", "0", "0") + " && " + numbered(430, "0", "0"), DENIED),
    Escape("root writable again", "mount -o remount,rw /", "must be superuser|Operation not permitted"),
    Escape("no /work any more", "umount /work", "must be superuser|not permitted|umount failed|No such file"),
    Escape("the node's name", "echo x >/proc/sys/kernel/hostname", "Permission denied|Read-only"),
    Escape("settings of the kernel", "echo 1 >/proc/sys/vm/drop_caches", "Permission denied|Read-only"),
    Escape("sysrq", "echo h >/proc/sysrq-trigger", f"{DENIED}|{ABSENT}|Read-only"),
    Escape("oom score of PID 1", "echo -1000 >/proc/1/oom_score_adj", DENIED),
    Escape("devices", "echo x >/dev/x; echo x >/dev/shm/x; exit 1", f"{ABSENT}|Read-only|{DENIED}"),
    Escape("a set-user-ID program", "su -c id; exit 1", "su: "),
    Escape("ownership", "touch o; chown 0:0 o", "Operation not permitted|Invalid argument"),
    Escape("extra privileges of a file", "touch c; setcap cap_sys_admin+ep c || exit 1", "not found|not permitted"),
)

TOO_MUCH = (
    Escape(
        "fork bomb",
        "bomb() {{ bomb | bomb & }}; bomb; sleep 100",
        "fork: .*Resource temporarily unavailable",
        (SandboxLimit.PROCESSES, SandboxLimit.TIME),
        timeout_s=2.0,
    ),
    Escape(
        "processes that stay",
        "while :; do sleep 50 & done",
        "fork: .*Resource temporarily unavailable",
        (SandboxLimit.PROCESSES,),
        (KILLED,),
        timeout_s=2.0,
    ),
    Escape(
        "threads that stay",
        "perl -Mthreads -e 'for (1 .. 99) {{ threads->create(sub {{ sleep 50 }}) or die \"no thread\\n\" }}'",
        "Resource temporarily unavailable|no thread",
        (SandboxLimit.PROCESSES, SandboxLimit.NONE),  # they end with their process, before anybody can look
    ),
    Escape("a large file", "head -c 2000000 /dev/zero >f", "", (SandboxLimit.FILE,), (XFSZ,)),
    Escape(
        "a full folder",
        "for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero >f$i; done",
        "No space left on device",
        (SandboxLimit.FOLDER,),
    ),
    Escape(
        "a full /tmp",
        "for i in 1 2 3 4 5 6; do head -c 1000000 /dev/zero >/tmp/f$i; done",
        "No space left on device",
        (SandboxLimit.FOLDER,),
    ),
    Escape(
        "no file left",
        "i=0; while :>e$i; do i=$((i + 1)); done; exit 1",
        "No space left on device",
        (SandboxLimit.FOLDER,),
        only="unshare",
    ),
    Escape("endless output", "yes", "", (SandboxLimit.OUTPUT,), (KILLED,)),
    Escape("endless errors", "yes >&2", "", (SandboxLimit.OUTPUT,), (KILLED,)),
    Escape("endless output from behind", "setsid yes & wait", "", (SandboxLimit.OUTPUT,), (KILLED,)),
    Escape("endless output by path", "yes >/dev/stdout", "", (SandboxLimit.OUTPUT,), (KILLED,)),
    Escape("memory", "tr '\\0' x </dev/zero | sort -S 2G >/dev/null; exit ${{PIPESTATUS[1]}}", "memory exhausted"),
    Escape("memory by mmap", "perl -e '$x = \"x\" x (1 << 30)'", "Out of memory"),
    Escape("CPU time", "while :; do :; done", "", (SandboxLimit.CPU,), (XCPU,)),
    Escape("CPU time, unwilling", "trap '' XCPU; while :; do :; done", "", (SandboxLimit.NONE,), (KILLED,)),
    Escape("more of everything", "ulimit -u 999 || ulimit -v 99999999 || ulimit -f 99999999", "cannot modify limit"),
)

TIME = tuple(
    Escape(f"time: {name}", command, "", (SandboxLimit.TIME,), (KILLED,), timeout_s=0.5)
    for name, command in (
        ("asleep", "sleep 100"),
        ("deaf to signals", "trap '' TERM INT HUP XCPU; sleep 100; sleep 100"),
        ("another session", "setsid sleep 100 & wait"),
        ("two forks away", "(setsid bash -c '(sleep 100 & wait) & wait' & wait) & wait"),
        ("stopped", "kill -STOP $BASHPID"),
        ("a pipe that nobody reads", "mkfifo p; echo x >p"),
        ("out of output", "exec >&- 2>&-; sleep 100"),
    )
)

NETWORK = (
    Escape("TCP to the node", "echo x >/dev/tcp/127.0.0.1/{tcp}", "Connection refused"),
    Escape("TCP over IPv6", "echo x >/dev/tcp/::1/{tcp}", "Connection refused|Cannot assign|not supported"),
    Escape("TCP to far away", "echo x >/dev/tcp/192.0.2.1/80", UNREACHABLE),
    Escape(
        "UDP to the node",
        "exec 9<>/dev/udp/127.0.0.1/{udp}; echo x >&9; sleep 0.1; echo y >&9 || exit 1; sleep 0.1; echo z >&9",
        "Connection refused",
    ),
    Escape("UDP to far away", "echo x >/dev/udp/192.0.2.1/{udp}", UNREACHABLE),
    Escape("UDP to everybody", "echo x >/dev/udp/255.255.255.255/{udp}", f"{UNREACHABLE}|{DENIED}"),
    Escape("raw packets", open_socket(17, 3), "Address family not supported"),
    Escape("ICMP", open_socket(2, 3), "Protocol not supported|Operation not permitted"),
    Escape("an abstract Unix socket", abstract("{abstract}"), "Connection refused"),
    Escape("a Unix socket's path", open_socket(1, 1, r'connect(S, pack_sockaddr_un("{unix}")) or die "$!\n"'), ABSENT),
    Escape("the virtual machine's host (vsock)", open_socket(40, 1), "Address family not supported"),
    Escape("the kernel's own protocols (alg, packet)", open_socket(38, 5), "Address family not supported"),
    Escape(
        "a device down",
        open_socket(2, 2, r'$f = pack("a16 s x22", "lo", 0); ioctl(S, 0x8914, $f) or die "$!\n"'),
        DENIED,
    ),
    Escape("another network namespace", "nsenter -t 1 -n true", DENIED),
)

SIGNALS = (
    Escape("kill a process of the node", "kill -9 {bystander}", "No such process"),
    Escape("kill the host process", "kill -9 {host}", "No such process"),
    Escape("kill the launcher", "kill -9 {launcher} 0", "No such process", exit_codes=(1, KILLED)),
    Escape("kill everything", "kill -9 -1; exit 3", exit_codes=(3, KILLED)),
    Escape("kill PID 1", "kill -9 1; kill -STOP 1; kill -SEGV 1; exit 3", exit_codes=(3,), says="^$"),
    Escape("renice PID 1", "renice -n -5 -p 1", DENIED),
)

NAMESPACES = (
    Escape("a user namespace", "unshare -r true", DENIED),
    Escape("a user namespace by clone", call("clone", "0x10000011", "0", "0", "0", "0"), DENIED),
    Escape("a mount namespace", "unshare -m true", DENIED),
    Escape("clone3", numbered(435, "0", "0"), "Function not implemented"),
    Escape("chroot", 'perl -e \'chroot "/work" or die "$!\\n"\'', DENIED),
    Escape("the launcher's namespaces", "nsenter -t 1 -m -u -i -p true", DENIED),
    Escape("bwrap in a sandbox", "bwrap --dev-bind / / true || unshare -U true", f"{DENIED}|not found"),
)

KERNEL = (
    Escape("bpf", call("bpf"), DENIED),
    Escape("perf_event_open", call("perf_event_open"), DENIED),
    Escape("userfaultfd", call("userfaultfd", "1"), DENIED),
    Escape("io_uring", numbered(425, "1", "0"), DENIED),
    Escape("kexec", call("kexec_load"), DENIED),
    Escape("a module", call("init_module"), DENIED),
    Escape("its log", 'perl -e \'require "syscall.ph"; syscall(&SYS_syslog, 10, 0, 0) < 0 and die "$!\\n"\'', DENIED),
    *([Escape("the other architecture's calls", i386_call(), exit_codes=(SYS, SEGV))] if X86 else []),
)

ESCAPES: dict[str, tuple[Escape, ...]] = {
    "read the secret": READ_THE_SECRET,
    "write outside": WRITE_OUTSIDE,
    "too much": TOO_MUCH,
    "time": TIME,
    "network": NETWORK,
    "signals": SIGNALS,
    "namespaces": NAMESPACES,
    "kernel": KERNEL,
}
