"""Rank 0's link over real sockets, without torch: what ends it, and how failures get out."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading

import pytest

from checkpoints.publish import publish_bytes
from miles_hpc.control.auth import load_secret, new_secret
from miles_hpc.control.membership import ServiceAddress, publish_service
from miles_hpc.control.opening import open_transport
from miles_hpc.control.terms import claim_term
from miles_hpc.core import exits
from miles_hpc.core.config import ControlConfig
from miles_hpc.core.errors import IntegrityError, RemoteError
from miles_hpc.core.messages import Ack, CheckpointWritten, LoadState, Shutdown, TrainerReady
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Credentials, PeerIdentity
from miles_hpc.core.types import ModelShape
from miles_hpc.trainer.failures import Failure
from miles_hpc.trainer.link import ControllerLink, Ended, Request

CONTROL = ControlConfig(
    lease_s=0.5, heartbeat_interval_s=0.05, start_deadline_s=20.0, connect_deadline_s=10.0, call_deadline_s=5.0
)
READY = TrainerReady(step=0, world_size=1, shape=ModelShape(vocab_size=1, max_position_embeddings=1), n_parameters=1)
LOAD = LoadState(checkpoint="", deadline_s=10)


class Board:
    """A failure board in memory."""

    def __init__(self):
        self.error = None
        self.acknowledged = threading.Event()

    def read(self):
        return self.error

    def acknowledge(self):
        self.acknowledged.set()


@contextlib.contextmanager
def open_link(root):
    paths = RunPaths(root)
    paths.attempt(1).mkdir(parents=True, exist_ok=True)
    publish_bytes(paths.secret, new_secret(), mode=0o600)

    def identity(term):
        return PeerIdentity(role="trainer", name="trainer-rank0", host="h", pid=1, attempt=1, term=term)

    async def no_weights(endpoint, message, payload):
        raise AssertionError("nobody asks for weights here")

    board = Board()
    link = ControllerLink(CONTROL, paths, load_secret(paths.secret), identity, no_weights, failures=board)
    link.start()
    try:
        yield link, paths, board
    finally:
        link.close()


@contextlib.asynccontextmanager
async def controller(paths):
    """A term's controller; yields (term, future of the trainer's endpoint, what the trainer sent)."""
    term = claim_term(paths, 1)
    who = PeerIdentity(role="controller", name="controller", host="h", pid=1, attempt=1, term=term)
    joined, sent = asyncio.get_running_loop().create_future(), []

    async def join(endpoint):
        joined.set_result(endpoint)

    async def handle(endpoint, message, payload):
        sent.append(message)

    transport = open_transport("tcp", Credentials(load_secret(paths.secret), who))
    listener = await transport.listen(handle, on_connect=join)
    publish_service(paths, ServiceAddress(name="controller", addresses=(listener.address,), attempt=1, term=term))
    try:
        yield term, joined, sent
    finally:
        await listener.close()


async def next_item(link, timeout_s=20.0):
    return await asyncio.to_thread(link.inbox.get, True, timeout_s)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_call_waits_for_the_main_thread_and_a_report_arrives(tmp_path):
    async def scenario():
        with open_link(tmp_path) as (link, paths, _):
            async with controller(paths) as (term, joined, sent):
                endpoint = await joined
                call = asyncio.ensure_future(endpoint.call(LOAD, payload=[b"abc"], deadline_s=20))
                request = await next_item(link)
                assert isinstance(request, Request)
                assert (request.message, bytes(request.payload), request.term) == (LOAD, b"abc", term)
                assert not call.done()
                link.answer(request, (READY, (b"xyz",)))
                reply = await call
                assert reply.message == READY and bytes(reply.payload) == b"xyz"
                written = CheckpointWritten(step=1, folder="f", files={}, duration_s=0.0)
                link.report(written)
                while not sent:
                    await asyncio.sleep(0.01)
                assert sent == [written]
                assert (await endpoint.call(Shutdown(reason="done"), deadline_s=10)).message == Ack()
                assert await next_item(link) == Ended("done", exits.DONE)

    run(scenario)


def test_a_newer_term_is_followed_and_a_lease_ends(tmp_path):
    async def scenario():
        with open_link(tmp_path) as (link, paths, _):
            async with controller(paths) as (first, joined, _):
                old = await joined
                async with controller(paths) as (second, joined_second, _):
                    new = await joined_second
                    await asyncio.wait_for(old.closed.wait(), 20)
                    while link.term != 2:  # admitted here a moment before the link knows
                        await asyncio.sleep(0.01)
                    assert (first, second) == (1, 2) and new.peer.term == 2
                with pytest.raises(queue.Empty):
                    link.inbox.get(timeout=0.1)
            ended = await next_item(link)
            assert ended.exit_code == exits.FAILED and "lost the controller of term 2" in ended.reason

    run(scenario)


def test_a_newer_attempt_fences(tmp_path):
    async def scenario():
        with open_link(tmp_path) as (link, paths, _):
            async with controller(paths) as (_, joined, _):
                await joined
                paths.attempt(2).mkdir()
                ended = await next_item(link)
                assert ended.exit_code == exits.FENCED and "attempt 2" in ended.reason

    run(scenario)


def test_a_failure_on_any_rank_fails_the_call_under_way(tmp_path):
    """The main thread stays silent all the while, as it does in a collective with a rank that is gone."""

    async def scenario():
        with open_link(tmp_path) as (link, paths, board):
            async with controller(paths) as (_, joined, _):
                endpoint = await joined
                call = asyncio.ensure_future(endpoint.call(LOAD, deadline_s=20))
                assert isinstance(await next_item(link), Request)
                try:
                    raise IntegrityError("payload p: damaged")
                except IntegrityError as error:
                    board.error = Failure.of(error, 3).error()
                with pytest.raises(RemoteError) as caught:
                    await call
                assert caught.value.kind == "IntegrityError"
                assert "trainer rank 3" in caught.value.text and "Traceback" in caught.value.text
                ended = await next_item(link)
                assert ended.exit_code == exits.FAILED and "payload p: damaged" in ended.reason
                assert board.acknowledged.is_set()

    run(scenario)


@pytest.mark.parametrize(("raised", "kind"), [(ValueError("v"), "MilesError"), (RemoteError("t"), "MilesError")])
def test_other_errors_keep_their_name_in_the_text(raised, kind):
    error = Failure.of(raised, 0).error()
    assert type(error).__name__ == kind and type(raised).__name__ in str(error)
