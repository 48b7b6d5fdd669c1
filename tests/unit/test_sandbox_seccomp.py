"""The seccomp filter, as the kernel would run it, on both architectures. Real calls: test_sandbox_escapes.py."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from miles_hpc.rollout.sandbox_seccomp import DENIED, FAMILIES, build_filter

X86, ARM = 0xC000003E, 0xC00000B7
I386 = 0x40000003
MACHINES = {"x86_64": X86, "aarch64": ARM}
ALLOW, KILL = "allow", "kill"
# Taken from the C libraries' headers, not from the module.
NUMBERS = {
    "x86_64": {"read": 0, "clone": 56, "execve": 59, "socket": 41, "connect": 42, "ptrace": 101, "openat": 257},
    "aarch64": {"read": 63, "clone": 220, "execve": 221, "socket": 198, "connect": 203, "ptrace": 117, "openat": 56},
}


def answer(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str:
    """What the filter says to a call: seccomp(2)'s data, run by linux/filter.h's rules."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("=IIQ6Q", number, architecture or MACHINES[machine], 0, *padded)
    program = list(struct.iter_unpack("=HBBI", build_filter(machine)))
    accumulator, at = 0, 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:  # BPF_RET | BPF_K
            if value == 0x80000000:
                return KILL
            if value == 0x7FFF0000:
                return ALLOW
            assert value & 0xFFFF0000 == 0x00050000
            return errno.errorcode[value & 0xFFFF]
        else:
            tests = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
            at += yes if tests[code] else no


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_go_through(machine: str) -> None:
    for name, number in NUMBERS[machine].items():
        assert answer(machine, number, 17 if name == "clone" else 1) == ALLOW, name  # SIGCHLD; AF_UNIX
    others = set(range(600)) - set(DENIED[machine].values()) - {435, NUMBERS[machine]["socket"]}
    assert {answer(machine, number) for number in others} == {ALLOW}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_shut(machine: str) -> None:
    for name, number in DENIED[machine].items():
        assert answer(machine, number) == "EPERM", name
    assert answer(machine, 435) == "ENOSYS"  # clone3


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_makes_threads_but_no_namespaces(machine: str) -> None:
    clone = NUMBERS[machine]["clone"]
    assert answer(machine, clone, 0x3D0F00) == ALLOW  # what pthread_create asks for
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, clone, bit | 17) == "EPERM"
    assert answer(machine, clone, 0xFFFFFFFF_00000000 | 17) == ALLOW  # the kernel takes the low half


@pytest.mark.parametrize("machine", MACHINES)
def test_families_of_sockets(machine: str) -> None:
    socket = NUMBERS[machine]["socket"]
    for family in range(64):
        expected = ALLOW if family in FAMILIES.values() else "EAFNOSUPPORT"
        assert answer(machine, socket, family, 1) == expected
    assert answer(machine, socket, 0xFFFFFFFF_00000000 | 40) == "EAFNOSUPPORT"  # AF_VSOCK, with a high half


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architectures_calls_kill(machine: str) -> None:
    for architecture in {I386, X86, ARM} - {MACHINES[machine]}:
        assert answer(machine, NUMBERS[machine]["read"], architecture=architecture) == KILL


def test_the_second_set_of_calls_isnt_there() -> None:
    assert answer("x86_64", 0x40000000 | NUMBERS["x86_64"]["read"]) == "ENOSYS"


@pytest.mark.parametrize(
    ("machine", "header", "prefix"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "__NR_"),
        ("aarch64", "/usr/include/asm-generic/unistd.h", "__NR(?:3264)?_"),
    ],
)
def test_numbers_are_those_of_the_kernels_headers(machine: str, header: str, prefix: str) -> None:
    if not Path(header).is_file():
        pytest.skip(f"no {header} here")
    defined = dict(re.findall(rf"#define {prefix}(\w+)\s+(\d+)", Path(header).read_text()))
    known = {name: number for name, number in DENIED[machine].items() if name in defined}
    assert set(DENIED[machine]) - set(known) <= {"open_tree_attr"}  # newer than some headers
    assert known == {name: int(defined[name]) for name in known}
    for name, number in NUMBERS[machine].items():
        assert int(defined[name]) == number


def test_programs_are_short_and_unknown_machines_have_none() -> None:
    assert all(len(build_filter(machine)) // 8 <= 255 for machine in MACHINES)
    with pytest.raises(KeyError):
        build_filter("riscv64")
