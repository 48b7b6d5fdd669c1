"""Weights over a real transport: staging, pulling in buckets, damage, lies and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from miles_hpc.control.opening import open_transport
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import DeadlineExpired, IntegrityError, PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import Ack, DescribeWeights, EngineInfo, FetchPieces, Message, PieceBucket, WeightManifest
from miles_hpc.core.transport import Credentials, Endpoint, Handler, PeerIdentity
from miles_hpc.core.types import WeightPiece, WeightVersion
from miles_hpc.weights.broadcast import WeightSource, fetch
from miles_hpc.weights.bucket import unpack
from miles_hpc.weights.plan import plan_digest

V1, V2, V3 = (WeightVersion(1, n) for n in (1, 2, 3))


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def tensors(seed: int, sizes: Sequence[int] = (3, 50, 1, 7, 0, 20)) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [
        Tensor(f"layer.{i}", "float32", (n, 2), memoryview(rng.standard_normal((n, 2), np.float32)))
        for i, n in enumerate(sizes)
    ]


def contents(held: Sequence[Tensor]) -> dict[str, bytes]:
    return {t.name: t.data.tobytes() for t in held}


@contextlib.asynccontextmanager
async def connected(handler: Handler, kind: str = "loopback") -> AsyncIterator[Endpoint]:
    def credentials(role: str) -> Credentials:
        identity = PeerIdentity(role=role, name=role, host="here", pid=1, attempt=1, term=1)
        return Credentials(secret=bytes(32), identity=identity)

    listener = await open_transport(kind, credentials("weights")).listen(handler)
    endpoint = await open_transport(kind, credentials("engine")).connect(listener.address, deadline_s=10)
    try:
        yield endpoint
    finally:
        await endpoint.close()
        await listener.close()


class Receiver:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.buckets = 0

    def keep(self, pieces: Sequence[WeightPiece], data: memoryview) -> None:
        self.buckets += 1
        self.held.update((p.name, bytes(view)) for p, view in unpack(pieces, data))


async def pull(endpoint: Endpoint, manifest: WeightManifest, receiver: Receiver, seconds: float = 30, **more):
    return await fetch(
        endpoint.call, manifest.version, manifest.plan_digest, receiver.keep, deadline=Deadline(seconds, "test"), **more
    )


@pytest.mark.parametrize("kind", ["loopback", "tcp"])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_every_byte_arrives_in_any_bucket_size(kind: str, bucket_bytes: int) -> None:
    async def scenario() -> None:
        source, receiver = WeightSource(), Receiver()
        manifest = source.stage(V1, tensors(0))
        async with connected(source.handle, kind) as endpoint:
            seen = await pull(endpoint, manifest, receiver, bucket_bytes=bucket_bytes)
        assert seen == manifest
        assert receiver.held == contents(tensors(0))
        assert receiver.buckets == {1: 6, 100: 4, 1 << 20: 1}[bucket_bytes]

    asyncio.run(scenario())


def test_newest_two_versions_stay_and_are_served_side_by_side() -> None:
    async def scenario() -> None:
        source = WeightSource()
        manifests = [source.stage(v, tensors(v.step)) for v in (V1, V2, V3)]
        assert source.versions == (V2, V3)
        async with connected(source.handle) as endpoint:
            for manifest in manifests[1:]:
                receiver = Receiver()
                await pull(endpoint, manifest, receiver)
                assert receiver.held == contents(tensors(manifest.version.step))
            with pytest.raises(RemoteError, match=r"1\.1 isn't staged"):
                await pull(endpoint, manifests[0], Receiver())

    asyncio.run(scenario())


def test_staging_refuses_reuse_twins_and_wrong_sizes() -> None:
    source = WeightSource()
    manifest = source.stage(V1, tensors(0))
    assert manifest.plan_digest == plan_digest(V1, manifest.pieces)
    with pytest.raises(ProtocolError, match="never reused"):
        source.stage(V1, tensors(1))
    with pytest.raises(IntegrityError, match="twice"):
        source.stage(V2, [*tensors(0), tensors(0)[0]])
    with pytest.raises(IntegrityError, match="expected 80"):
        source.stage(V2, [Tensor("a", "float32", (10, 2), memoryview(bytes(79)))])
    assert source.versions == (V1,)


def test_source_answers_nothing_else() -> None:
    async def scenario() -> None:
        source = WeightSource()
        source.stage(V1, tensors(0))
        async with connected(source.handle) as endpoint:
            for message in (
                EngineInfo(),
                FetchPieces(version=V1, first=0, last=7),
                FetchPieces(version=V1, first=2, last=2),
                FetchPieces(version=V1, first=-1, last=2),
                DescribeWeights(version=V2),
            ):
                with pytest.raises(RemoteError) as caught:
                    await endpoint.call(message, deadline_s=10)
                assert caught.value.kind == "ProtocolError"

    asyncio.run(scenario())


def tampering(source: WeightSource, times: int, seen: list[FetchPieces]) -> Handler:
    """A source whose first `times` replies about piece 1 carry one wrong byte."""

    async def handle(endpoint: Endpoint, message: Message, payload: memoryview):
        answer = await source.handle(endpoint, message, payload)
        if isinstance(message, FetchPieces):
            seen.append(message)
            hits = sum(m.first <= 1 < m.last for m in seen)
            if message.first <= 1 < message.last and hits <= times:
                views = [bytearray(v) for v in answer[1]]
                views[1 - message.first][5] ^= 0x40
                return answer[0], views
        return answer

    return handle


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_damage_is_fetched_once_more_and_no_more(bucket_bytes: int) -> None:
    async def scenario() -> None:
        source, receiver, seen = WeightSource(), Receiver(), []
        manifest = source.stage(V1, tensors(0))
        async with connected(tampering(source, 1, seen)) as endpoint:
            await pull(endpoint, manifest, receiver, bucket_bytes=bucket_bytes)
        assert receiver.held == contents(tensors(0))
        assert len(seen) == receiver.buckets + 1
        receiver = Receiver()
        async with connected(tampering(source, 2, [])) as endpoint:
            with pytest.raises(IntegrityError, match=r"'layer\.1'"):
                await pull(endpoint, manifest, receiver, bucket_bytes=bucket_bytes)
        assert "layer.1" not in receiver.held

    asyncio.run(scenario())


def test_manifest_that_was_not_announced_is_refused() -> None:
    async def scenario() -> None:
        source = WeightSource()
        manifest = source.stage(V1, tensors(0))
        lie = WeightManifest(version=V1, pieces=manifest.pieces[:-1], plan_digest=manifest.plan_digest)

        async def liar(endpoint: Endpoint, message: Message, payload: memoryview):
            return lie if isinstance(message, DescribeWeights) else await source.handle(endpoint, message, payload)

        receiver = Receiver()
        async with connected(liar) as endpoint:
            with pytest.raises(IntegrityError, match="plan digest"):
                await pull(endpoint, manifest, receiver)
        async with connected(source.handle) as endpoint:
            with pytest.raises(IntegrityError, match="plan digest"):
                await fetch(endpoint.call, V1, b"\1" * 16, receiver.keep, deadline=Deadline(10, "test"))

            def refuse(seen: WeightManifest) -> None:
                raise IntegrityError("not our model")

            with pytest.raises(IntegrityError, match="not our model"):
                await pull(endpoint, manifest, receiver, on_manifest=refuse)
        assert receiver.buckets == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        Ack(),
        PieceBucket(version=V2, first=0, last=1),
        (PieceBucket(version=V1, first=0, last=1), [b"short"]),
    ],
)
def test_wrong_answers_are_errors_and_nothing_is_handed_over(answer: object) -> None:
    async def scenario() -> None:
        source, receiver = WeightSource(), Receiver()
        manifest = source.stage(V1, tensors(0))

        async def handle(endpoint: Endpoint, message: Message, payload: memoryview):
            return answer if isinstance(message, FetchPieces) else await source.handle(endpoint, message, payload)

        async with connected(handle) as endpoint:
            with pytest.raises((ProtocolError, IntegrityError)):
                await pull(endpoint, manifest, receiver, bucket_bytes=1)
        assert receiver.buckets == 0

    asyncio.run(scenario())


def ending(source: WeightSource, end: Callable[[Endpoint], object]) -> Handler:
    async def handle(endpoint: Endpoint, message: Message, payload: memoryview):
        if isinstance(message, FetchPieces) and message.first >= 2:
            await end(endpoint)
        return await source.handle(endpoint, message, payload)

    return handle


def test_silent_or_dead_source_ends_the_fetch_within_its_deadline() -> None:
    async def scenario() -> None:
        source = WeightSource()
        manifest = source.stage(V1, tensors(0))
        never = asyncio.Event()
        async with connected(ending(source, lambda endpoint: never.wait())) as endpoint:
            with pytest.raises(DeadlineExpired):
                await pull(endpoint, manifest, Receiver(), seconds=0.5, bucket_bytes=1)
            never.set()
        async with connected(ending(source, lambda endpoint: endpoint.close("dies"))) as endpoint:
            with pytest.raises(PeerLost):
                await pull(endpoint, manifest, Receiver(), bucket_bytes=1)

    asyncio.run(scenario())


def test_empty_version_is_fetched_without_a_bucket() -> None:
    async def scenario() -> None:
        source, receiver = WeightSource(), Receiver()
        manifest = source.stage(V1, [])
        async with connected(source.handle) as endpoint:
            assert await pull(endpoint, manifest, receiver) == manifest
        assert receiver.buckets == 0

    asyncio.run(scenario())
