"""The ucx carrier's ucx-py arm, over a fake that moves bytes within this process (tests/fakes/ucp.py)."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pytest

from miles_hpc.control import ucx as ucx_carrier
from miles_hpc.control.opening import open_carrier
from miles_hpc.control.ucx_pieces import PIECE_BYTES
from miles_hpc.core.errors import PeerLost, UserError
from miles_hpc.core.messages import EndSession, Heartbeat, Message
from miles_hpc.core.transport import Endpoint
from tests.conformance.transport_kinds import WAIT_S, echo, make, pair, plain_pair
from tests.fakes import ucp
from tests.unit.test_ucx import LIES, Liar, run, the_wire

SIZES = [(0,), (1,), (5, 0, 7), (20_000,), (PIECE_BYTES,), (PIECE_BYTES + 1, 3, 2 * PIECE_BYTES)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    ucp.install(monkeypatch)
    monkeypatch.setattr(ucx_carrier, "_facts", None)


def test_no_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ucxx", "ucxx._lib.libucxx", "ucp", "ucp._libs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="install ucxx") as caught:
        open_carrier("ucx")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", SIZES)
def test_ucx_py_payloads_both_ways(sizes: tuple[int, ...], fake: None) -> None:
    buffers = [os.urandom(n) for n in sizes]

    async def main() -> None:
        async with pair("ucx", echo, echo) as (dialer, accepted, _):
            for endpoint in (dialer, accepted, dialer):
                reply = await endpoint.call(Heartbeat(), payload=buffers, deadline_s=WAIT_S)
                assert bytes(reply.payload) == b"".join(buffers)

    run(main)
    assert {"tag_send_nb", "tag_recv_nb"} <= set(ucp.calls)


def test_ucx_py_blocking_face_and_release(fake: None) -> None:
    with plain_pair("ucx") as (dialer, _, _, transport):
        assert transport.chosen()["package"] == "ucx-py 0.45.fake"
        assert transport.chosen()["devices"] == "fake/memory"
        calls = [dialer.begin(EndSession(session_id=str(n)), payload=[b"x" * n], deadline_s=WAIT_S) for n in range(300)]
        for n, call in enumerate(calls):
            assert call.result().message == EndSession(session_id=str(n))
    assert {"UCXEndpoint.close", "UCXWorker.close", "UCXContext.close"} <= set(ucp.calls)


@pytest.mark.parametrize("what", list(LIES))
def test_ucx_py_changed_messages_end_the_endpoint(what: str, fake: None) -> None:
    async def main() -> None:
        async with pair("ucx") as (dialer, accepted, _):
            await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            Liar(the_wire(dialer), LIES[what])
            with pytest.raises(PeerLost):
                await dialer.notify(Heartbeat())
                await dialer.call(Heartbeat(), payload=[bytes(PIECE_BYTES), bytes(5000)], deadline_s=WAIT_S)
                await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            await asyncio.wait_for(accepted.closed.wait(), WAIT_S)

    run(main)


def test_ucx_py_a_peer_that_ucx_gives_up_is_lost(fake: None) -> None:
    """Its line stays open: as a broken fabric beside a working network would look."""

    async def never(endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with pair("ucx", never) as (dialer, accepted, _):
            call = asyncio.create_task(dialer.call(Heartbeat(), payload=[bytes(100_000)], deadline_s=WAIT_S))
            await asyncio.sleep(0.05)
            ucp.kill(the_wire(accepted)._worker.api.address)
            with pytest.raises(PeerLost, match="UCX reports that the peer is gone"):
                await call
            assert dialer.closed.is_set()
            with pytest.raises(PeerLost):
                await dialer.call(Heartbeat(), deadline_s=WAIT_S)

    run(main)


def test_ucx_py_no_way_to_the_peer(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        listener = await make("ucx", "listener").listen(echo)

        def unreachable(*_: Any, **__: Any) -> None:
            raise ucp.UCXError("Destination is unreachable")

        monkeypatch.setattr(ucp.UCXEndpoint, "create_from_worker_address", unreachable)
        with pytest.raises(PeerLost):
            await make("ucx", "dialer").connect(listener.address, deadline_s=WAIT_S)
        await listener.close()

    run(main)
