"""Every escape of escapes.py, tried for real: what it is told, and that the node is as it was, seen from outside."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from miles_hpc.core.messages import SandboxResult
from miles_hpc.rollout.sandbox_host import SandboxHost, SandboxLimits
from tests.conformance.escapes import ESCAPES, Escape

LIMITS = SandboxLimits(
    cpu_s=1, memory_bytes=256 << 20, file_bytes=1 << 20, folder_bytes=4 << 20, processes=24, discard_bytes=1 << 16
)
#: What a process of the node has to hide: in its environment, in its memory, behind a descriptor.
BYSTANDER = "import os, sys; held = open(sys.argv[1]); copy = held.read(); print(flush=True); sys.stdin.read()"


class Node:
    """What there is on the node to read, write, reach and kill, and whether all of it is as it was."""

    def __init__(self, stack: ExitStack) -> None:
        # Not below TMPDIR of the session alone: the path must be open to all, so that only the sandbox keeps it shut.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="node-")))
        folder.chmod(0o755)
        self.value = secrets.token_hex(32)
        self.secret = folder / "secret.key"
        self.secret.write_text(self.value)
        self.secret.chmod(0o644)
        self.outside = folder / "outside"
        self.outside.write_text("as it was")
        self.outside.chmod(0o666)
        self.bystander = subprocess.Popen(
            [sys.executable, "-c", BYSTANDER, str(self.secret)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "MILES_TEST_SECRET": self.value},
        )
        stack.callback(self._end_bystander)
        assert self.bystander.stdout is not None and self.bystander.stdout.readline() == b"\n"
        self.unix = str(folder / "socket")
        self.abstract = f"node-{self.value[:16]}"
        self.sockets = {
            "tcp": socket.create_server(("127.0.0.1", 0)),
            "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            "unix": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
            "abstract": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        }
        self.sockets["udp"].bind(("0.0.0.0", 0))
        for name, address in (("unix", self.unix), ("abstract", "\0" + self.abstract)):
            self.sockets[name].bind(address)
            self.sockets[name].listen()
        Path(self.unix).chmod(0o777)
        for each in self.sockets.values():
            each.setblocking(False)
            stack.callback(each.close)

    def _end_bystander(self) -> None:
        self.bystander.kill()
        self.bystander.communicate()

    def words(self, launcher: int) -> dict[str, object]:
        """What the attempts need to know of it."""
        return {
            "secret": self.secret,
            "outside": self.outside,
            "bystander": self.bystander.pid,
            "host": os.getpid(),
            "launcher": launcher,
            "tcp": self.sockets["tcp"].getsockname()[1],
            "udp": self.sockets["udp"].getsockname()[1],
            "unix": self.unix,
            "abstract": self.abstract,
        }

    def check(self) -> None:
        """Raises AssertionError for anything that isn't as it was."""
        assert self.outside.read_text() == "as it was"
        assert sorted(p.name for p in self.outside.parent.iterdir()) == ["outside", "secret.key", "socket"]
        assert self.bystander.poll() is None
        for name, each in self.sockets.items():
            with pytest.raises(BlockingIOError):
                each.recv(1) if name == "udp" else each.accept()


class Scene:
    """One host of a kind with a neighbour that mustn't notice anything; every attempt gets a new sandbox."""

    def __init__(self, isolation: str, runner: asyncio.Runner, node: Node) -> None:
        self.isolation = isolation
        self.node = node
        self.most_tasks = self.most_bytes = 0  # of all attempts so far
        self._runner = runner
        self._host = SandboxHost(isolation=isolation, limits=LIMITS)  # type: ignore[arg-type]
        self._runner.run(self._host.start())
        self._runner.run(self._begin())

    async def _begin(self) -> None:
        self._host.create("neighbour", {"private": self.node.value})
        listen = r'socket(S, 1, 1, 0); bind(S, pack("S a*", 1, "\0neighbour")) or die; listen(S, 9); sleep 9999'
        await self._execute("neighbour", f"cp private /tmp; perl -MSocket -e '{listen}' & sleep 0.2")

    async def _execute(self, sandbox: str, command: str, timeout_s: float = 30.0) -> SandboxResult:
        return await self._host.execute(sandbox, command, timeout_s=timeout_s, max_output_bytes=1 << 14)

    @property
    def launcher(self) -> int:
        assert self._host.runner.link is not None
        return self._host.runner.link.process.pid

    def attempt(self, escape: Escape) -> tuple[SandboxResult, SandboxResult]:
        """What it is told, and what the next command of the same sandbox is."""

        async def play() -> tuple[SandboxResult, SandboxResult]:
            command = escape.command
            for word, value in self.node.words(self.launcher).items():
                command = command.replace(f"{{{word}}}", str(value))
            self._host.create("s", {"given": "as it was\n"})
            watch = asyncio.create_task(self._watch())
            try:
                told = await self._execute("s", command.replace("{{", "{").replace("}}", "}"), escape.timeout_s)
                # Fork bombs that a command leaves behind, and a folder that it filled, are the next one's as well.
                self._host.create("s", {"given": "as it was\n"})
                return told, await self._execute("s", "cat given; exit 7")
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                self._host.destroy("s")

        return self._runner.run(play())

    async def _watch(self) -> None:
        """While it runs: never more processes, and never more in the folders, than the limits say."""
        while True:
            tasks = _descendants(self.launcher)
            self.most_tasks = max(self.most_tasks, len(tasks))
            for pid in tasks:
                for folder in ("work", "tmp"):
                    try:
                        room = os.statvfs(f"/proc/{pid}/root/{folder}")
                    except OSError:
                        continue
                    if room.f_blocks * room.f_frsize == LIMITS.folder_bytes:  # a sandbox's own
                        self.most_bytes = max(self.most_bytes, (room.f_blocks - room.f_bfree) * room.f_frsize)
            await asyncio.sleep(0.05)

    def check(self) -> None:
        neighbour = self._runner.run(
            self._execute("neighbour", "cat private /tmp/private; ls; ls /proc | grep -c '^[0-9]'")
        )
        assert neighbour.output.startswith(f"{self.node.value}{self.node.value}private\n")
        self.node.check()

    def close(self) -> None:
        launcher = self.launcher
        self._runner.run(self._host.close())
        assert not Path(f"/proc/{launcher}").exists()


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [d for c in children for d in _descendants(c)]


@pytest.fixture(scope="module", params=["unshare", "bubblewrap"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("no bwrap here")
    if shutil.which("perl", path="/usr/bin:/bin") is None:
        pytest.skip("no perl in sandboxes here, which makes bare system calls")
    with ExitStack() as stack:
        node = Node(stack)
        scene = Scene(request.param, stack.enter_context(asyncio.Runner()), node)
        stack.callback(scene.close)
        yield scene


@pytest.mark.parametrize(
    "escape",
    [pytest.param(escape, id=f"{group}-{escape.name}") for group, escapes in ESCAPES.items() for escape in escapes],
)
def test_every_escape_is_contained_and_told(scene: Scene, escape: Escape) -> None:
    if escape.only not in ("", scene.isolation):
        pytest.skip(f"not promised by {scene.isolation}")
    told, after = scene.attempt(escape)
    assert scene.node.value not in told.output
    assert re.search(escape.says, told.output, re.MULTILINE), told
    assert told.limit in escape.limits, told
    assert told.exit_code in escape.exit_codes if escape.exit_codes else told.exit_code != 0, told
    assert told.duration_s < escape.timeout_s + 10.0
    assert (after.exit_code, after.output) == (7, "as it was\n")
    assert scene.most_bytes <= LIMITS.folder_bytes
    # Beside the sandbox: the launcher's inner half, the neighbour with its two, and bwrap's outer halves.
    assert scene.most_tasks <= LIMITS.processes + 8
    scene.check()


def test_each_has_an_error_of_its_own() -> None:
    """The groups of the table can be told apart by what a sandbox answers."""
    for escapes in ESCAPES.values():
        assert all(escape.says or any(escape.limits) or escape.exit_codes for escape in escapes)
    names = [escape.name for escapes in ESCAPES.values() for escape in escapes]
    assert len(names) == len(set(names))
