"""Weights over the control transport: the trainer's rank 0 serves a staged version, engines pull it bucket by bucket.

    trainer rank 0                          engine
    stage(version) ─▶ WeightSource  ◀──── DescribeWeights ── fetch()   manifest: names, shapes, digests
                                    ◀──── FetchPieces ────────         one bucket at a time, verified on arrival

Every engine pulls at its own pace and there is no barrier: a version stays fetchable until two newer ones are staged.
Tied weights appear once, under the first name of `named_parameters()`; buffers aren't sent, since both sides make
them from the model's config.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, ProtocolError
from miles_hpc.core.messages import DescribeWeights, FetchPieces, Message, PieceBucket, WeightManifest
from miles_hpc.core.transport import Buffer, Endpoint, Reply
from miles_hpc.core.types import WeightPiece, WeightVersion
from miles_hpc.weights.bucket import byte_view, digest_bytes, expected_bytes, verify
from miles_hpc.weights.plan import DEFAULT_BUCKET_BYTES, plan_buckets, plan_digest

__all__ = ["Call", "SourceTensor", "WeightSource", "fetch"]

#: Versions kept at a source: the newest, and the one that slow engines may still be pulling.
KEPT_VERSIONS = 2


class SourceTensor(Protocol):
    """A full tensor in host memory; the trainer's HostTensor is one."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> memoryview: ...


class Call(Protocol):
    """`Endpoint.call`, which is all that fetching needs of a connection."""

    def __call__(self, message: Message, *, payload: Sequence[Buffer] = (), deadline_s: float) -> Awaitable[Reply]: ...


@dataclass(frozen=True)
class _Staged:
    manifest: WeightManifest
    views: tuple[memoryview, ...]


class WeightSource:
    """Serves staged versions; `handle` is a Transport handler, or a part of one.

    `stage` may run in another thread than `handle`: a version becomes visible by one assignment, complete.
    """

    def __init__(self) -> None:
        self._staged: dict[WeightVersion, _Staged] = {}

    @property
    def versions(self) -> tuple[WeightVersion, ...]:
        """Staged versions, oldest first."""
        return tuple(self._staged)

    def stage(self, version: WeightVersion, tensors: Iterable[SourceTensor]) -> WeightManifest:
        """Digest `tensors` and make them fetchable; of earlier versions the newest stays.

        The tensors' memory is served as it is, without a copy: it must not change while the version is staged.
        Raises ProtocolError for a version that was staged before, IntegrityError for a tensor whose bytes don't fit
        its shape, or a name that comes twice.
        """
        if version in self._staged:
            raise ProtocolError(f"weight version {version} is staged already: versions are never reused")
        pieces: list[WeightPiece] = []
        views: list[memoryview] = []
        names: set[str] = set()
        for tensor in tensors:
            view = byte_view(tensor.data).toreadonly()
            expected = expected_bytes(tensor.dtype, tensor.shape)
            if view.nbytes != expected:
                raise IntegrityError(
                    f"weight '{tensor.name}' {tensor.dtype} {list(tensor.shape)}: {view.nbytes} bytes, "
                    f"expected {expected}"
                )
            if tensor.name in names:
                raise IntegrityError(f"weight '{tensor.name}' comes twice: send tied weights once")
            names.add(tensor.name)
            views.append(view)
            pieces.append(
                WeightPiece(
                    name=tensor.name,
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    n_bytes=view.nbytes,
                    digest=digest_bytes(view),
                )
            )
        manifest = WeightManifest(version=version, pieces=tuple(pieces), plan_digest=plan_digest(version, pieces))
        kept = dict(list(self._staged.items())[-(KEPT_VERSIONS - 1) :])
        kept[version] = _Staged(manifest, tuple(views))
        self._staged = kept
        return manifest

    async def handle(
        self, endpoint: Endpoint, message: Message, payload: memoryview
    ) -> Message | tuple[Message, Sequence[Buffer]]:
        """Answer DescribeWeights and FetchPieces; raises ProtocolError for anything else."""
        if isinstance(message, DescribeWeights):
            return self._find(message.version).manifest
        if isinstance(message, FetchPieces):
            staged = self._find(message.version)
            if not 0 <= message.first < message.last <= len(staged.views):
                raise ProtocolError(
                    f"pieces [{message.first}, {message.last}) of {message.version}: it has {len(staged.views)}"
                )
            reply = PieceBucket(version=message.version, first=message.first, last=message.last)
            return reply, staged.views[message.first : message.last]
        raise ProtocolError(f"a weight source doesn't answer {type(message).__name__}")

    def _find(self, version: WeightVersion) -> _Staged:
        staged = self._staged.get(version)
        if staged is None:
            held = ", ".join(map(str, self._staged)) or "none"
            raise ProtocolError(f"weight version {version} isn't staged here (staged: {held})")
        return staged


async def fetch(
    call: Call,
    version: WeightVersion,
    digest: bytes,
    on_bucket: Callable[[Sequence[WeightPiece], memoryview], None],
    *,
    deadline: Deadline,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    on_manifest: Callable[[WeightManifest], None] | None = None,
) -> WeightManifest:
    """Pull `version` through `call` and hand its buckets, in order and verified, to `on_bucket`.

    `digest` is the plan digest that the controller announced; the source's manifest must have it. `on_manifest` sees
    the manifest before any bucket, and may raise to refuse it. The view given to `on_bucket` is valid during the call
    only. The next bucket is on its way while one is verified and handed over.

    A bucket whose bytes don't match their digests is fetched once more. Raises IntegrityError when it differs again
    or when the manifest isn't the announced one, DeadlineExpired, and what `call` raises.
    """
    reply = await call(DescribeWeights(version=version), deadline_s=deadline.remaining_s)
    manifest = reply.message
    if not isinstance(manifest, WeightManifest):
        raise ProtocolError(f"DescribeWeights was answered with {type(manifest).__name__}")
    if manifest.version != version or manifest.plan_digest != digest or plan_digest(version, manifest.pieces) != digest:
        raise IntegrityError(
            f"weight version {version}: the source's manifest is {manifest.version} with plan digest "
            f"{manifest.plan_digest.hex()}, expected {digest.hex()}"
        )
    for piece in manifest.pieces:
        if piece.n_bytes != expected_bytes(piece.dtype, piece.shape):
            raise IntegrityError(f"weight '{piece.name}': manifest says {piece.n_bytes} bytes for its shape")
    if on_manifest is not None:
        on_manifest(manifest)
    buckets = plan_buckets(manifest.pieces, bucket_bytes)
    ahead = asyncio.ensure_future(_pull(call, version, *buckets[0], deadline)) if buckets else None
    try:
        for i, (first, last) in enumerate(buckets):
            assert ahead is not None
            data = await ahead
            ahead = None
            if i + 1 < len(buckets):
                ahead = asyncio.ensure_future(_pull(call, version, *buckets[i + 1], deadline))
            pieces = manifest.pieces[first:last]
            try:
                await asyncio.to_thread(verify, pieces, data)
            except IntegrityError:
                data = await _pull(call, version, first, last, deadline)
                await asyncio.to_thread(verify, pieces, data)
            on_bucket(pieces, data)
    finally:
        if ahead is not None:
            ahead.cancel()
            await asyncio.gather(ahead, return_exceptions=True)
    return manifest


async def _pull(call: Call, version: WeightVersion, first: int, last: int, deadline: Deadline) -> memoryview:
    deadline.check()
    reply = await call(FetchPieces(version=version, first=first, last=last), deadline_s=deadline.remaining_s)
    if reply.message != PieceBucket(version=version, first=first, last=last):
        raise ProtocolError(f"FetchPieces {version} [{first}, {last}) was answered with {reply.message}")
    return reply.payload
