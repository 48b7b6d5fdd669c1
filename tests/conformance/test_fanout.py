"""Fan-out over the real transports, and with real processes that end in the middle of a command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from miles_hpc.control.auth import load_secret
from miles_hpc.control.fanout import FanOut, FanOutResult
from miles_hpc.control.links import Links
from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import PeerLost, UserError
from miles_hpc.core.messages import ChildEvent, EndSession, Heartbeat, Message, RelayTarget
from tests.fakes.fleet import SECRET, credentials, fleet

WAIT_S = 120.0  # a bound against hanging, not an expectation
REPOSITORY = Path(__file__).resolve().parents[2]


def needs(kind: str) -> None:
    try:
        open_transport(kind, credentials("probe"))
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["loopback", "tcp", "ucx"])
@pytest.mark.parametrize("n_bytes", [0, 100, 300_000])
def test_delivery(kind: str, n_bytes: int) -> None:
    needs(kind)
    data = os.urandom(n_bytes)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), fleet(21, kind=kind, arity=4) as some:
            for _ in range(3):
                message = EndSession(session_id="s")
                result = await some.root.call(message, some.targets, payload=[data], deadline_s=WAIT_S)
                assert result.errors == {}
                assert result.sent == 4
                for name, reply in result.replies.items():
                    assert reply.message == ChildEvent(child=name, exit_code=n_bytes)
                    assert bytes(reply.payload) == data + name.encode()
            assert all(len(peer.ran) == 3 for peer in some.peers)
            some.check_links(4)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["loopback", "tcp", "ucx"])
@pytest.mark.parametrize(("n", "sent"), [(1, 1), (2, 2), (7, 3), (64, 3)])
def test_sizes(kind: str, n: int, sent: int) -> None:
    needs(kind)

    async def main() -> bool:
        async with asyncio.timeout(WAIT_S), fleet(n, kind=kind, arity=3) as some:
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert (result.errors, len(result.replies)) == ({}, n)
            if result.sent != sent:  # one that got no time counted as silent, and was done without
                return False
            assert all(len(peer.ran) == 1 for peer in some.peers)
            return True

    assert any(asyncio.run(main()) for _ in range(5))


@pytest.mark.parametrize("kind", ["loopback", "tcp", "ucx"])
def test_losses(kind: str) -> None:
    needs(kind)

    async def main() -> None:
        fates = ["dies_after", "", "gone", "", "", "dies_before"] * 4
        async with asyncio.timeout(WAIT_S), fleet(24, kind=kind, arity=3, fates=fates) as some:
            result = await some.root.call(Heartbeat(), some.targets, deadline_s=WAIT_S)
            assert sorted(result.errors) == [peer.name for peer in some.peers if peer.fate]
            assert all(isinstance(error, PeerLost) for error in result.errors.values())
            assert all(len(peer.ran) == 1 for peer in some.peers if not peer.fate)

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ processes


class Workers:
    """Real processes, named worker00 and so on."""

    def __init__(self, folder: Path, processes: list[subprocess.Popen[str]]) -> None:
        self.folder = folder
        self.processes = processes
        self.names = [f"worker{number:02}" for number in range(len(processes))]
        self.targets: list[RelayTarget] = []
        for name, process in zip(self.names, processes, strict=True):
            assert process.stdout is not None
            self.targets.append(RelayTarget(name, (process.stdout.readline().strip(),)))

    def ran(self, name: str) -> int:
        file = self.folder / f"{name}.ran"
        return len(file.read_text().splitlines()) if file.exists() else 0

    async def wait_until_ran(self, names: list[str]) -> None:
        end = time.monotonic() + WAIT_S
        while not all(self.ran(name) for name in names):
            assert time.monotonic() < end, [name for name in names if not self.ran(name)]
            await asyncio.sleep(0.02)

    def call(self, message: Message, **options: float) -> asyncio.Task[FanOutResult]:
        who = credentials("root", secret=load_secret(self.folder / "secret.key"))
        root = FanOut(Links(open_transport("tcp", who)), name="root", arity=2, direct_up_to=0, **options)
        return asyncio.create_task(root.call(message, self.targets, payload=[b"p" * 1000], deadline_s=WAIT_S))


@contextmanager
def workers(n: int, folder: Path) -> Iterator[Workers]:
    secret = folder / "secret.key"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    command = [sys.executable, "-m", "tests.fakes.relay_worker", "tcp"]
    processes = [
        subprocess.Popen(
            [*command, f"worker{number:02}", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for number in range(n)
    ]
    try:
        yield Workers(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [0, 1, 6], ids=["head", "head_of_second_level", "other_head"])
def test_a_relay_killed_in_the_middle_of_a_command(number: int, tmp_path: Path) -> None:
    async def main(some: Workers) -> None:
        call = some.call(EndSession(session_id="go on"))
        await some.wait_until_ran(some.names)
        some.processes[number].kill()
        await asyncio.sleep(0.3)
        assert not call.done()
        (some.folder / "go on").touch()
        result = await call
        assert list(result.errors) == [some.names[number]]
        assert isinstance(result.errors[some.names[number]], PeerLost)
        assert all(reply.message == ChildEvent(child=name, exit_code=1000) for name, reply in result.replies.items())
        assert [some.ran(name) for name in some.names] == [1] * 12

    with workers(12, tmp_path) as some:
        asyncio.run(main(some))


def test_a_stopped_relay_holds_up_nobody_behind_it(tmp_path: Path) -> None:
    async def main(some: Workers) -> None:
        head = some.processes[0]
        head.send_signal(signal.SIGSTOP)
        call = some.call(Heartbeat(), silent_s=0.5)
        await some.wait_until_ran(some.names[1:])
        assert not call.done()
        head.send_signal(signal.SIGCONT)  # its answer still counts
        result = await call
        assert result.errors == {}
        assert [some.ran(name) for name in some.names] == [1] * 12

    with workers(12, tmp_path) as some:
        asyncio.run(main(some))
