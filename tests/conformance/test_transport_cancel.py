"""Calls that are given up, asyncio face: which handlers are stopped, and what is sent at all."""

from __future__ import annotations

import asyncio

import pytest

from miles_hpc.core.errors import DeadlineExpired, PeerLost
from miles_hpc.core.messages import Ack, EndSession, Heartbeat, Message, Shutdown
from miles_hpc.core.transport import Endpoint
from tests.conformance.transport_kinds import CANCELLABLE, WAIT_S, numbered, pair, run, until


class Patient:
    """A handler that waits until it's released or cancelled, and says which."""

    def __init__(self) -> None:
        self.begun = 0
        self.outcomes: list[str] = []
        self.release = asyncio.Event()

    async def __call__(self, endpoint: Endpoint, message: Message, payload: memoryview) -> None:
        self.begun += 1
        try:
            await self.release.wait()
            self.outcomes.append("finished")
        except asyncio.CancelledError:
            self.outcomes.append("cancelled")
            raise


@pytest.mark.parametrize("how", ["cancelled", "expired"])
@pytest.mark.parametrize("message", [CANCELLABLE, EndSession(session_id="to be finished")], ids=["may", "must not"])
def test_only_a_cancellable_handler_is_stopped_when_its_caller_gives_up(kind: str, how: str, message: Message) -> None:
    async def main() -> None:
        patient = Patient()
        async with pair(kind, patient) as (dialer, _, _):
            call = asyncio.create_task(dialer.call(message, deadline_s=0.3 if how == "expired" else WAIT_S))
            await until(lambda: patient.begun == 1)
            if how == "cancelled":
                call.cancel()
            with pytest.raises((asyncio.CancelledError, DeadlineExpired)):
                await call
            if message.cancellable:
                await until(lambda: bool(patient.outcomes))
                assert patient.outcomes == ["cancelled"]
            else:
                await asyncio.sleep(0.05)
                assert not patient.outcomes
            patient.release.set()
            assert (await dialer.call(message, deadline_s=WAIT_S)).message == Ack()
            assert len(patient.outcomes) == 2
            assert patient.outcomes[-1] == "finished"

    run(main)


def test_a_call_that_is_cancelled_before_it_began_sends_nothing(kind: str) -> None:
    async def main() -> None:
        patient = Patient()
        async with pair(kind, patient) as (dialer, _, _):
            call = asyncio.create_task(dialer.call(numbered(1), deadline_s=WAIT_S))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            patient.release.set()
            await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            assert patient.begun == 1

    run(main)


def test_call_and_cancel_that_arrive_together(kind: str) -> None:
    """The handler hasn't had its first turn; whether it has begun or not, it ends, and a coroutine isn't forgotten."""

    async def main() -> None:
        patient = Patient()
        async with pair(kind, patient) as (dialer, _, _):
            calls = [asyncio.create_task(dialer.call(CANCELLABLE, deadline_s=WAIT_S)) for _ in range(20)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            patient.release.set()
            await dialer.call(Heartbeat(), deadline_s=WAIT_S)
            await until(lambda: len(patient.outcomes) == patient.begun)
            assert patient.outcomes.count("cancelled") == patient.begun - 1

    run(main)


def test_a_handler_that_ends_well_although_cancelled_harms_nobody(kind: str) -> None:
    begun = 0

    async def stubborn(endpoint: Endpoint, message: Message, payload: memoryview) -> Message | None:
        nonlocal begun
        begun += 1
        if isinstance(message, Shutdown):
            return message
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
        return None

    async def main() -> None:
        async with pair(kind, stubborn) as (dialer, _, _):
            with pytest.raises(DeadlineExpired):
                await dialer.call(CANCELLABLE, deadline_s=0.2)
            for _ in range(3):
                assert (await dialer.call(Shutdown(reason="x"), deadline_s=WAIT_S)).message == Shutdown(reason="x")
            assert begun == 4

    run(main)


@pytest.mark.parametrize("message", [CANCELLABLE, numbered(0)], ids=["cancellable", "not cancellable"])
def test_the_end_of_the_endpoint_stops_cancellable_handlers_only(kind: str, message: Message) -> None:
    async def main() -> None:
        patient = Patient()
        async with pair(kind, patient) as (dialer, _, _):
            call = asyncio.create_task(dialer.call(message, deadline_s=WAIT_S))
            await until(lambda: patient.begun == 1)
            await dialer.close()
            with pytest.raises(PeerLost):
                await call
            if message.cancellable:
                await until(lambda: patient.outcomes == ["cancelled"])
            else:
                await asyncio.sleep(0.05)
                assert not patient.outcomes
                patient.release.set()
                await until(lambda: patient.outcomes == ["finished"])

    run(main)
