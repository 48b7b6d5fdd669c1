"""The transport contract between processes: what every rank of an MPI world or a Slurm step runs, of any kind.

    python -P -m tests.conformance.transport_program KIND FOLDER [--interface NAME]

FOLDER holds the secret; addresses are published there, except for mpi, whose addresses are ranks. Even ranks have the
asyncio face, odd ones the blocking face. Every rank listens, connects to every rank (loopback: to itself only), runs
the checks on each connection, tells all that it's done, and waits for all. At last it prints "fine RANK KIND FACE ...".

| order (EndSession.session_id) | answer |
|---|---|
| echo | message and payload |
| back | calls `echo` on the same endpoint, answers what came back |
| sleep SECONDS | after that time |
| fail | UserError |
| items N | a stream: item i has i thousand bytes |
| note N | none; remembered |
| notes | the notes of this endpoint, as text |
| load | the most messages that were in work at once, on this endpoint |
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from checkpoints.publish import publish_bytes
from miles_hpc.control.addresses import local_address
from miles_hpc.control.auth import load_secret
from miles_hpc.control.frames import Limits
from miles_hpc.control.opening import open_blocking_transport, open_transport
from miles_hpc.core.env import read
from miles_hpc.core.errors import DeadlineExpired, RemoteError, UserError
from miles_hpc.core.messages import EndSession, Message, Shutdown
from miles_hpc.core.transport import BlockingEndpoint, Credentials, Endpoint, PeerIdentity, PendingCall

WAIT_S = 120.0
LIMITS = Limits(window_messages=8, window_bytes=4 << 20)
SIZES = (0, 1, 4095, 16 << 10, 65_536, (1 << 20) - 1, (1 << 20) + 1, 8 << 20)
ROLES = ("controller", "trainer", "rollout", "sandbox")
N_NOTES, N_ITEMS, N_CALLS = 300, 40, 100


def order(text: str) -> EndSession:
    return EndSession(session_id=text)


def text_of(message: Message) -> str:
    assert isinstance(message, EndSession), message
    return message.session_id


def pattern(n_bytes: int) -> list[bytes]:
    """A payload in three buffers of odd sizes, so that pieces span them."""
    data = bytes(i * 7 % 251 for i in range(min(n_bytes, 4096)))
    data = (data * (n_bytes // 4096 + 1))[:n_bytes] if data else b""
    return [data[: n_bytes // 3], data[n_bytes // 3 : n_bytes // 2], data[n_bytes // 2 :]]


class Book:
    """What a rank remembers of those who call it."""

    def __init__(self) -> None:
        self.notes: dict[Any, list[str]] = defaultdict(list)
        self.in_work: dict[Any, int] = defaultdict(int)
        self.most: dict[Any, int] = defaultdict(int)
        self.done = 0

    def take(self, endpoint: Any) -> None:
        self.in_work[endpoint] += 1
        self.most[endpoint] = max(self.most[endpoint], self.in_work[endpoint])

    def plain_answer(self, endpoint: Any, message: Message, payload: memoryview) -> Any:
        """The answers that need neither waiting nor a face; None: it's another order."""
        if isinstance(message, Shutdown):
            self.done += 1
            return order("bye")
        word, _, rest = text_of(message).partition(" ")
        if word == "echo":
            return message, [payload]
        if word == "fail":
            raise UserError("as ordered")
        if word == "note":
            self.notes[endpoint].append(rest)
            return order("")
        if word == "notes":
            return order(" ".join(self.notes[endpoint]))
        if word == "load":
            return order(str(self.most[endpoint]))
        return None


def check_notes(text: str) -> None:
    assert text.split() == [str(n) for n in range(N_NOTES)], text[:200]


def check_items(items: list[tuple[str, int]]) -> None:
    assert items == [(str(n), 1000 * n) for n in range(N_ITEMS)], items


# ------------------------------------------------------------------------------------------ asyncio


class AsyncRank:
    """A rank with the asyncio face."""

    def __init__(self, kind: str, credentials: Credentials) -> None:
        self.book = Book()
        self._transport = open_transport(kind, credentials, limits=LIMITS)

    def run(self, bind: str, publish: Callable[[str], None], peers: dict[int, Callable[[], str]]) -> dict[str, str]:
        return asyncio.run(self._main(bind, publish, peers))

    async def _main(
        self, bind: str, publish: Callable[[str], None], peers: dict[int, Callable[[], str]]
    ) -> dict[str, str]:
        listener = await self._transport.listen(self._handle, bind=bind)
        publish(listener.address)
        addresses = {rank: await asyncio.to_thread(find) for rank, find in peers.items()}
        endpoints = await asyncio.gather(
            *(self._transport.connect(a, self._handle, deadline_s=WAIT_S) for a in addresses.values())
        )
        await asyncio.gather(*(self._check(e, r) for e, r in zip(endpoints, addresses, strict=True)))
        for endpoint in endpoints:
            await endpoint.call(Shutdown(reason="done"), deadline_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while self.book.done < len(peers):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the last of them gets its answer
        for endpoint in endpoints:
            await endpoint.close("done")
        await listener.close()
        await asyncio.sleep(0.1)
        return self._transport.chosen()

    async def _handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> Any:
        self.book.take(endpoint)
        try:
            answer = self.book.plain_answer(endpoint, message, payload)
            if answer is not None:
                if len(payload) == 3:
                    await asyncio.sleep(0.01)  # so that calls of the window test meet
                return answer
            word, _, rest = text_of(message).partition(" ")
            if word == "sleep":
                await asyncio.sleep(float(rest))
                return None
            if word == "back":
                reply = await endpoint.call(order("echo"), payload=[payload], deadline_s=WAIT_S)
                return order("back"), [reply.payload]
            return self._items(int(rest))
        finally:
            self.book.in_work[endpoint] -= 1

    async def _items(self, n: int) -> AsyncIterator[Any]:
        for i in range(n):
            yield order(str(i)), [bytes(1000 * i)]

    async def _check(self, endpoint: Endpoint, rank: int) -> None:
        assert endpoint.peer.name == f"rank{rank}"
        for size in SIZES:
            for word in ("echo", "back"):
                reply = await endpoint.call(order(word), payload=pattern(size), deadline_s=WAIT_S)
                assert bytes(reply.payload) == b"".join(pattern(size)), (word, size)
        for n in range(N_NOTES):
            await endpoint.notify(order(f"note {n}"), payload=pattern(n % 3 * 30_000))
        check_notes(text_of((await endpoint.call(order("notes"), deadline_s=WAIT_S)).message))
        calls = [endpoint.call(order("echo"), payload=[b"abc"], deadline_s=WAIT_S) for _ in range(N_CALLS)]
        assert all(bytes(reply.payload) == b"abc" for reply in await asyncio.gather(*calls))
        load = int(text_of((await endpoint.call(order("load"), deadline_s=WAIT_S)).message))
        assert load <= LIMITS.window_messages, load
        async with endpoint.stream(order(f"items {N_ITEMS}"), deadline_s=WAIT_S) as items:
            check_items([(text_of(item.message), len(item.payload)) async for item in items])
        async with endpoint.stream(order("items 100000"), deadline_s=WAIT_S) as items:
            assert text_of((await anext(items)).message) == "0"
        try:
            await endpoint.call(order("sleep 0.6"), deadline_s=0.2)
            raise AssertionError("no deadline")
        except DeadlineExpired as error:
            assert f"rank{rank}: EndSession: nothing after 0." in str(error), error
        try:
            await endpoint.call(order("fail"), deadline_s=WAIT_S)
            raise AssertionError("no failure")
        except RemoteError as error:
            assert error.kind == "UserError" and "as ordered" in str(error)


# ------------------------------------------------------------------------------------------ blocking


class BlockingRank:
    """A rank with the blocking face."""

    def __init__(self, kind: str, credentials: Credentials) -> None:
        self.book = Book()
        self._transport = open_blocking_transport(kind, credentials, limits=LIMITS)

    def run(self, bind: str, publish: Callable[[str], None], peers: dict[int, Callable[[], str]]) -> dict[str, str]:
        transport = self._transport
        listener = transport.listen(self._handle, bind=bind)
        publish(listener.address)
        addresses = {rank: find() for rank, find in peers.items()}
        endpoints = [transport.connect(a, self._handle, deadline_s=WAIT_S) for a in addresses.values()]
        for endpoint, rank in zip(endpoints, addresses, strict=True):
            self._check(endpoint, rank)
        for endpoint in endpoints:
            endpoint.call(Shutdown(reason="done"), deadline_s=WAIT_S)
        assert transport.serve(lambda: self.book.done == len(peers), deadline_s=WAIT_S)
        transport.serve(lambda: False, deadline_s=0.1)
        chosen = transport.chosen()
        transport.close()
        return chosen

    def _handle(self, endpoint: BlockingEndpoint, message: Message, payload: memoryview) -> Any:
        self.book.take(endpoint)
        try:
            answer = self.book.plain_answer(endpoint, message, payload)
            if answer is not None:
                return answer
            word, _, rest = text_of(message).partition(" ")
            if word == "sleep":
                time.sleep(float(rest))
                return None
            if word == "back":
                reply = endpoint.call(order("echo"), payload=[payload], deadline_s=WAIT_S)
                return order("back"), [reply.payload]
            return self._items(int(rest))
        finally:
            self.book.in_work[endpoint] -= 1

    def _items(self, n: int) -> Iterator[Any]:
        for i in range(n):
            yield order(str(i)), [bytes(1000 * i)]

    def _check(self, endpoint: BlockingEndpoint, rank: int) -> None:
        assert endpoint.peer.name == f"rank{rank}"
        for size in SIZES:
            for word in ("echo", "back"):
                reply = endpoint.call(order(word), payload=pattern(size), deadline_s=WAIT_S)
                assert bytes(reply.payload) == b"".join(pattern(size)), (word, size)
        for n in range(N_NOTES):
            endpoint.notify(order(f"note {n}"), payload=pattern(n % 3 * 30_000), deadline_s=WAIT_S)
        check_notes(text_of(endpoint.call(order("notes"), deadline_s=WAIT_S).message))
        calls: list[PendingCall] = []
        for _ in range(N_CALLS):
            calls.append(endpoint.begin(order("echo"), payload=[b"abc"], deadline_s=WAIT_S))
        assert all(bytes(call.result().payload) == b"abc" for call in calls)
        load = int(text_of(endpoint.call(order("load"), deadline_s=WAIT_S).message))
        assert load <= LIMITS.window_messages, load
        with endpoint.stream(order(f"items {N_ITEMS}"), deadline_s=WAIT_S) as items:
            check_items([(text_of(item.message), len(item.payload)) for item in items])
        with endpoint.stream(order("items 100000"), deadline_s=WAIT_S) as items:
            assert text_of(next(items).message) == "0"
        if rank != endpoint_rank():  # a blocking rank that sleeps for itself can't expire meanwhile
            try:
                endpoint.call(order("sleep 0.6"), deadline_s=0.2)
                raise AssertionError("no deadline")
            except DeadlineExpired as error:
                assert f"rank{rank}: EndSession: nothing after 0." in str(error), error
        try:
            endpoint.call(order("fail"), deadline_s=WAIT_S)
            raise AssertionError("no failure")
        except RemoteError as error:
            assert error.kind == "UserError" and "as ordered" in str(error)


# ------------------------------------------------------------------------------------------ start


def endpoint_rank() -> int:
    """This process's rank, whoever started it."""
    rank: int = read("PMI_RANK") if "PMI_RANK" in os.environ else read("SLURM_PROCID")
    return rank


def world_size() -> int:
    size: int = read("PMI_SIZE") or read("SLURM_NTASKS")
    return size


def wait_for(file: Path) -> str:
    end = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > end:
            raise DeadlineExpired(f"{file}: not published after {WAIT_S} s")
        time.sleep(0.05)
    return file.read_text()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--interface", default="lo")
    arguments = parser.parse_args()
    kind, folder = arguments.kind, arguments.folder
    rank, size = endpoint_rank(), world_size()
    role = ROLES[min(rank, len(ROLES) - 1)]
    identity = PeerIdentity(
        role=role, name=f"rank{rank}", host=os.uname().nodename, pid=os.getpid(), attempt=1, term=1, rank=rank
    )
    credentials = Credentials(load_secret(folder / "secret"), identity)
    one = AsyncRank(kind, credentials) if rank % 2 == 0 else BlockingRank(kind, credentials)
    peers: dict[int, Callable[[], str]] = {}
    for other in range(size):
        file = folder / f"{kind}-{other}"
        if kind == "mpi":
            peers[other] = f"mpi://{other}".__str__
        elif kind != "loopback" or other == rank:
            peers[other] = lambda file=file: wait_for(file)  # type: ignore[misc]
    chosen = one.run(
        local_address(arguments.interface),
        lambda address: publish_bytes(folder / f"{kind}-{rank}", address.encode(), durable=False),
        peers,
    )
    face = "asyncio" if rank % 2 == 0 else "blocking"
    line = f"fine {rank} {kind} {face} {', '.join(f'{k}={v}' for k, v in chosen.items())}\n"
    os.write(1, line.encode())  # in one piece, though many ranks write
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(2)
