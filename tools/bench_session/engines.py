"""Engines that cost next to nothing: one that answers at once, and one that asks a tiny backend over HTTP."""

from __future__ import annotations

import aiohttp
import msgspec
import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import PeerLost, ProtocolError, RemoteError
from miles_hpc.core.messages import EngineDescription, WeightsSynced
from miles_hpc.core.types import FinishReason, SamplingParams, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation, RolloutEngine
from miles_hpc.rollout.sglang.api import generate_request, parse_generation

__all__ = ["V1", "HttpEngine", "InstantEngine"]

V1 = WeightVersion(1, 1)


class _Engine(RolloutEngine):
    """What no benchmark asks for."""

    async def describe(self) -> EngineDescription:
        raise ProtocolError(f"{self.name}: an engine of a benchmark only generates")

    async def score(self, tokens: npt.NDArray[np.int32], *, deadline_s: float) -> npt.NDArray[np.float32]:
        raise ProtocolError(f"{self.name}: an engine of a benchmark only generates")

    async def end_session(self, session_id: str) -> None:
        pass

    async def abort(self, request_id: str = "") -> None:
        pass

    async def sync(
        self, version: WeightVersion, source: str, plan_digest: bytes, *, deadline_s: float
    ) -> WeightsSynced:
        raise ProtocolError(f"{self.name}: an engine of a benchmark only generates")

    async def close(self) -> None:
        pass


class InstantEngine(_Engine):
    """Samples the same tokens for every request."""

    def __init__(self, name: str, output_ids: list[int]) -> None:
        self.name = name
        self._generation = Generation(
            output_ids=np.asarray(output_ids, np.int32),
            log_probs=np.full(len(output_ids), -1, np.float32),
            versions=(VersionSpan(version=V1, start=0, end=len(output_ids)),),
            finish_reason=FinishReason.STOP,
            routed_experts=None,
            cached_tokens=0,
        )

    async def generate(
        self,
        request_id: str,
        session_id: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        routed_experts_start: int,
        deadline_s: float,
    ) -> Generation:
        return self._generation


class HttpEngine(_Engine):
    """SGLang's POST /generate at `url`, requests and answers as our adapter writes and reads them.

    Every request carries its session as X-SMG-Routing-Key, which a router needs and an engine passes over.
    """

    def __init__(self, name: str, url: str, http: aiohttp.ClientSession) -> None:
        self.name = name
        self._url = f"{url}/generate"
        self._http = http

    async def generate(
        self,
        request_id: str,
        session_id: str,
        input_ids: npt.NDArray[np.int32],
        sampling: SamplingParams,
        *,
        routed_experts_start: int,
        deadline_s: float,
    ) -> Generation:
        body = generate_request(
            request_id,
            input_ids,
            sampling,
            max_new_tokens=sampling.max_new_tokens,
            routed_experts_start=None,
            namespace="1.1",
        )
        headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": session_id}
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            data = msgspec.json.encode(body)
            async with self._http.post(self._url, data=data, headers=headers, timeout=timeout) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerLost(f"{self.name}: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            raise RemoteError(f"status {answer.status}: {content[:200]!r}", kind="EngineRefused", peer=self.name)
        return parse_generation(
            content,
            n_input=len(input_ids),
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            layers=None,
            routed_experts_start=routed_experts_start,
            spans=False,
        )
