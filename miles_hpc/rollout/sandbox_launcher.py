"""The sandbox launcher: one small process per sandbox host that starts sandboxes and ends them.

Run by sandbox_link.py, with stdlib modules only, so that it forks cheaply. It enters its own user, network, mount, PID,
IPC and UTS namespaces once, and a read-only root (sandbox_root.py); every sandbox is born in them (sandbox_births.py):

    sandbox host (asyncio)                       network, the run directory, secrets
      └─ launcher, outer half                    waits; dies with the host
          └─ launcher, PID 1 of its namespaces   no network, read-only root; ends every sandbox when it ends
              └─ sandbox: bash                   PID 1 of its own namespaces, no capabilities, own /work, /tmp, /proc
                  └─ commands, each in a subshell of that bash

Protocol: datagrams over a SOCK_SEQPACKET pair, text, fields separated by a blank:

    start ID    + 2 fds: the sandbox's control socket and the write end of its output pipe
    look ID     how much of its bounds is used
    clear ID    kill every process in the sandbox but its PID 1
    stop ID     kill the sandbox
    ready KIND / failed TEXT   the launcher's answer, once, at the start
    looked TASKS FULL          its answer to each look: tasks there are (0: unknown), 1 when a folder is full
    cleared                    its answer to each clear, when the processes have been killed

Answers come in the order of what they answer. That a sandbox has ended, or couldn't begin, is seen by its control
socket's end of file.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys

from miles_hpc.rollout.sandbox_births import Births, FolderBirths, NamespaceBirths
from miles_hpc.rollout.sandbox_kernel import check_machine, die_with_parent
from miles_hpc.rollout.sandbox_root import build_root, enter_namespaces
from miles_hpc.rollout.sandbox_seccomp import build_filter

__all__ = ["main", "serve"]


def serve(channel: socket.socket, births: Births) -> None:
    """Until the host's end closes."""
    poller = select.poll()  # not select(2), which ends at descriptor 1023: the host may have more
    poller.register(channel, select.POLLIN)
    children = False
    while True:
        # Not only while there are sandboxes: bwrap may be killed and reaped before its child, which is ours then.
        if poller.poll(1_000 if children else 30_000):
            message, fds, _, _ = socket.recv_fds(channel, 256, 2)
            for fd in fds:
                os.set_inheritable(fd, False)  # Python 3.11 drops the flag that would say so
            if not message:
                return
            verb, _, sandbox = message.decode().partition(" ")
            if verb == "start":
                births.start(sandbox, *fds)
            elif verb == "look":
                tasks, full = births.look(sandbox)
                channel.send(b"looked %d %d" % (tasks, full))
            elif verb == "clear":
                births.clear(sandbox)
                channel.send(b"cleared")
            elif verb == "stop":
                births.stop(sandbox)
        children = births.reap()


def main(arguments: list[str]) -> int:
    """`FD KIND DRIVER BWRAP SIZE`. Exit code 0 when the host closed the channel, 1 when isolation isn't possible."""
    fd, kind, driver, bwrap, size = arguments
    channel = socket.socket(fileno=int(fd))
    channel.set_inheritable(False)
    while True:  # keep received descriptors clear of 0..5, which sandboxes and bwrap get
        low = os.open("/dev/null", os.O_RDONLY)
        if low > 5:
            os.close(low)
            break
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and programs would inherit that
        signal.signal(number, signal.SIG_DFL)
    births: Births
    if kind == "none":
        die_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        births = FolderBirths(driver)
    else:
        try:
            check_machine()
            rules = build_filter(os.uname().machine)
            enter_namespaces()
            child = os.fork()
            if child:
                channel.close()
                _, status = os.waitpid(child, 0)
                return os.waitstatus_to_exitcode(status)
            die_with_parent(signal.SIGKILL)
            socket.sethostname("sandbox")
            build_root("/bin/bash", rules)
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except OSError as error:
            channel.send(f"failed {error}".encode())
            return 1
        births = NamespaceBirths(driver, bwrap if kind == "bubblewrap" else "", size, rules)
    channel.send(f"ready {kind}".encode())
    try:
        serve(channel, births)
    except (ConnectionResetError, BrokenPipeError):
        pass  # the host is gone
    finally:
        births.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
