"""The sandbox host's end of its launcher (sandbox_launcher.py): starts it, talks to it, ends it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from miles_hpc.core import env
from miles_hpc.core.errors import UserError

__all__ = ["LauncherLink"]

# The launcher gets a path of ours and nothing else from outside: no site-packages, no variables, no current folder.
_PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from miles_hpc.rollout.sandbox_launcher import main
sys.exit(main(sys.argv[1:]))
"""
_HERE = str(Path(__file__).resolve().parents[2])


class LauncherLink:
    """One launcher process. Made by `open`; belongs to the event loop in which that ran."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self.process = process
        self._channel: socket.socket | None = channel
        self._backlog: deque[tuple[bytes, Sequence[int]]] = deque()  # message, descriptors to pass and close
        self._asked: deque[asyncio.Future[str]] = deque()  # in the order in which the launcher answers

    @classmethod
    async def open(cls, kind: str, driver: str, folder_bytes: int) -> LauncherLink:
        """Start a launcher and wait until it has its namespaces. Raises UserError when it can't have them."""
        bwrap = shutil.which("bwrap") or ""
        if kind == "bubblewrap" and not bwrap:
            raise UserError("no bwrap on this node's PATH")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        arguments = [str(theirs.fileno()), kind, driver, bwrap, str(folder_bytes)]
        libraries = env.read("LD_LIBRARY_PATH")  # some interpreters need it to start; it isn't passed on
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-E", "-c", _PROGRAM, _HERE, *arguments),
                pass_fds=(theirs.fileno(),),
                env={"LD_LIBRARY_PATH": libraries} if libraries else {},
                cwd="/",
            )
        finally:
            theirs.close()
        link = cls(process, ours)
        try:
            answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(ours, 1024), 30.0)
        except (OSError, TimeoutError):
            answer = b"failed no answer after 30 s"
        verb, _, text = answer.decode().partition(" ")
        if verb != "ready":
            await link.close()
            raise UserError(text or "the launcher ended at its start")
        asyncio.get_running_loop().add_reader(ours.fileno(), link._on_answer)
        return link

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    def start(self, name: str, control: int, output: int) -> None:
        """Make a sandbox with these descriptors, which are closed here once they are passed."""
        self._backlog.append((f"start {name}".encode(), (control, output)))
        self._post()

    def clear(self, name: str) -> asyncio.Future[str]:
        """Kill everything in the sandbox but its PID 1; done when that has happened, or when the launcher is gone.

        Whatever is started in the sandbox before that may be killed as well.
        """
        return self._ask(f"clear {name}")

    def look(self, name: str) -> asyncio.Future[str]:
        """What the sandbox has used of its bounds now, for `Use.parse`; empty when the launcher is gone."""
        return self._ask(f"look {name}")

    def stop(self, name: str) -> None:
        """Kill the sandbox."""
        self._backlog.append((f"stop {name}".encode(), ()))
        self._post()

    def _ask(self, question: str) -> asyncio.Future[str]:
        answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._backlog.append((question.encode(), ()))
        self._post()
        return answer

    def _post(self) -> None:
        """Send what waits, in order; what doesn't fit follows when there is room."""
        channel = self._channel
        if channel is None:
            self._drop()
            return
        loop = asyncio.get_running_loop()
        loop.remove_writer(channel.fileno())
        while self._backlog:
            message, fds = self._backlog[0]
            try:
                socket.send_fds(channel, [message], fds)
            except (BlockingIOError, InterruptedError):
                loop.add_writer(channel.fileno(), self._post)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # as many descriptors under way as this user may have open
                    loop.call_later(0.01, self._post)
                    return
                # The launcher is gone: closing its descriptors tells each sandbox so.
            self._backlog.popleft()
            for fd in fds:
                os.close(fd)

    def _on_answer(self) -> None:
        assert self._channel is not None
        try:
            answer = self._channel.recv(1024)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if answer:
            _settle(self._asked.popleft(), answer.decode())
        else:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._drop()

    def _drop(self) -> None:
        """The launcher is gone: nothing that waits for it waits any longer."""
        while self._backlog:
            for fd in self._backlog.popleft()[1]:
                os.close(fd)
        while self._asked:
            _settle(self._asked.popleft(), "")

    def disconnect(self) -> None:
        """Close the channel, which ends the launcher and all sandboxes; idempotent."""
        if self._channel is not None:
            asyncio.get_running_loop().remove_writer(self._channel.fileno())
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        self._drop()

    async def close(self) -> None:
        """Disconnect and wait for the launcher's end."""
        self.disconnect()
        try:
            await asyncio.wait_for(self.process.wait(), 5.0)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def _settle(future: asyncio.Future[str], answer: str) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(answer)
