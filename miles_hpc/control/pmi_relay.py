"""Between MPI_Init and Slurm's process manager: values are cut so short that the manager can take them.

    MPI ──PMI_FD──▶ relay ──▶ slurmstepd        "cmd=maxes ... vallen_max=1024"  ─▶  "... vallen_max=940"

MPICH 5.0.2 (ch4:ucx) puts 4096 bytes from where its UCX address starts, not the 300 that are the address
(its source, MPIDI_UCX_comm_addr_exchange: the length that is sent is the largest possible one); the rest is whatever
the heap has behind it. In hexadecimal, with runs of zeros shortened, it goes in values of up to 1022 characters, for
Slurm says vallen_max=1024. But its pmi2 plugin takes PMI-1 requests of 1023 bytes, including command, names and key.
Where little of that memory is zero, a request is longer: "mpi/pmi2: value not properly terminated in client request",
and the world ends or hangs. That depends on all the process did before: the same start fails always or never.

Slurm 22.05, 2 ranks on 2 nodes, 25 starts with other memory freed before each: 22 failed, and as many with
M_PERTURB=255 or malloc_trim before MPI_Init, for what is in use or free behind the address stays. With the relay: 0 of
100.

A process and not a thread, for mpi4py keeps the interpreter's lock in MPI_Init. It ends when MPI_Init has: then MPI
goes on with the manager's own connection. PMI-2 messages pass as they are.
"""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["VALUE_BYTES", "short_values"]

#: 1023 less "cmd=put kvsname=<21> key=-allgather-1-<5 digits>-seg-9/9 value=" and the line's end; even, since MPICH
#: halves it in two ways that differ otherwise.
VALUE_BYTES = 940

_LIMIT = re.compile(rb"(?<=^cmd=maxes )(.*\bvallen_max=)(\d+)")
_CHUNK_BYTES = 1 << 16
_END_S = 10.0


@contextmanager
def short_values(pmi_fd: int) -> Iterator[None]:
    """While it's open, whoever talks PMI-1 over this descriptor is told a limit for values that Slurm keeps.

    Raises OSError when the relay can't be started.
    """
    ours, relay_end = socket.socketpair()
    manager = os.dup(pmi_fd)
    inheritable = os.get_inheritable(pmi_fd)
    command = [sys.executable, "-I", "-S", __file__, str(relay_end.fileno()), str(manager)]
    try:
        with relay_end:
            relay = subprocess.Popen(command, pass_fds=(relay_end.fileno(), manager), stdin=subprocess.DEVNULL)
        try:
            os.dup2(ours.fileno(), pmi_fd, inheritable=inheritable)
            ours.close()
            yield
        finally:
            os.dup2(manager, pmi_fd, inheritable=inheritable)  # closes our end as well, which ends the relay
            try:
                relay.wait(_END_S)
            except subprocess.TimeoutExpired:
                relay.kill()
                relay.wait()
    finally:
        ours.close()
        os.close(manager)


def shorten(answer: bytes) -> bytes:
    """The manager's answer, with the smaller limit if it is the one about limits."""
    return _LIMIT.sub(lambda found: found[1] + b"%d" % min(int(found[2]), VALUE_BYTES), answer)


def relay(client: int, manager: int) -> None:
    """Hand on what comes, until either side ends."""
    poll = select.poll()
    for fd in (client, manager):
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            data = os.read(fd, _CHUNK_BYTES)
            if not data:
                return
            if fd == manager:
                data = shorten(data)
            target = client if fd == manager else manager
            while data:
                data = data[os.write(target, data) :]


if __name__ == "__main__":
    try:
        relay(int(sys.argv[1]), int(sys.argv[2]))
    except OSError:  # a side was closed with something on its way
        pass
