"""SGLang's HTTP surface, one method per endpoint that is used. Every call has a deadline and checks what came back.

| raised | when |
|---|---|
| PeerLost | the server isn't there, or hung up |
| DeadlineExpired | it didn't answer in time |
| UserError | it refused the request (400): the request is wrong |
| EngineRefused | it refused a control call, by status or by `success: false` |
| IntegrityError | its answer isn't what the endpoint returns |

Two keys: the data key may generate, the admin key may change weights, pause and flush. Both are drawn for each start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import IntegrityError, MilesError, PeerLost, UserError

__all__ = ["EngineRefused", "SglangClient"]

_TEXT_CHARS = 500


class EngineRefused(MilesError):
    """A control call was answered with a refusal; the text has the server's words.

    What it changed isn't known: a weight update may be refused after weights changed.
    """


class SglangClient:
    """Connections to one server on loopback. Make it within an event loop; `close` it there."""

    def __init__(self, port: int, *, name: str, data_key: str, admin_key: str) -> None:
        self.name = name
        self._base = f"http://127.0.0.1:{port}"
        self._data = {"Authorization": f"Bearer {data_key}"}
        self._admin = {"Authorization": f"Bearer {admin_key}"}
        # Given up before the server gives them up (5 s): a POST on a connection that is being closed would be lost.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        # trust_env stays off: a site's proxy must not see loopback traffic.
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        await self._http.close()

    # ------------------------------------------------------------------------------------------ state

    async def healthy(self, deadline_s: float) -> bool:
        """Whether it computes: the server answers only after its scheduler did."""
        status, _ = await self._call("GET", "/health", None, self._data, Deadline(deadline_s, f"{self.name}: /health"))
        return status == 200

    async def paths(self, deadline_s: float) -> frozenset[str]:
        """The endpoints it has."""
        answer = await self._json("GET", "/openapi.json", None, self._data, deadline_s)
        found = answer.get("paths")
        if not isinstance(found, dict):
            raise IntegrityError(f"{self.name}: /openapi.json names no paths")
        return frozenset(found)

    async def weight_version(self, deadline_s: float) -> str:
        """The label of the weights that it serves."""
        answer = await self._json("GET", "/model_info", None, self._data, deadline_s)
        return str(answer.get("weight_version"))

    async def running_requests(self, deadline_s: float) -> int:
        """Requests that are being generated now."""
        answer = await self._json("GET", "/v1/loads?include=core", None, self._data, deadline_s)
        return sum(int(load.get("num_running_reqs", 0)) for load in answer.get("loads", []))

    # ------------------------------------------------------------------------------------------ generation

    async def generate(self, body: Mapping[str, Any], deadline: Deadline) -> bytes:
        """POST /generate; the body of an answer with status 200, whatever its finish reason."""
        status, data = await self._call("POST", "/generate", body, self._data, deadline)
        if status == 400:
            raise UserError(f"{self.name} refused the request: {_words(data)}")
        if status != 200:
            raise EngineRefused(f"{self.name}: /generate: status {status}: {_words(data)}")
        return data

    async def abort(self, request_id: str, deadline_s: float) -> None:
        """Abort one request. It answers with what it has."""
        await self._control("/abort_request", {"rid": request_id}, deadline_s)

    async def abort_all(self, deadline_s: float) -> None:
        """Abort every request of this server."""
        await self._control("/abort_request", {"abort_all": True}, deadline_s)

    # ------------------------------------------------------------------------------------------ control

    async def pause(self, mode: str, deadline_s: float) -> None:
        """in_place: requests stand still, and go on with their cache. retract: they give it up. abort: they end."""
        await self._control("/pause_generation", {"mode": mode}, deadline_s)

    async def go_on(self, deadline_s: float) -> None:
        """End a pause."""
        await self._control("/continue_generation", {"torch_empty_cache": False}, deadline_s)

    async def flush_cache(self, deadline_s: float) -> bool:
        """Forget all prefixes; False when it can't, since requests hold some."""
        deadline = Deadline(deadline_s, f"{self.name}: /flush_cache")
        status, _ = await self._call("POST", "/flush_cache", {}, self._admin, deadline)
        return status == 200

    async def begin_update(self, deadline_s: float) -> None:
        """Open a weight-update session (servers that have one; see `Capabilities`)."""
        await self._control("/begin_weight_update", {"selector": "target"}, deadline_s)

    async def end_update(self, deadline_s: float) -> None:
        await self._control("/end_weight_update", {}, deadline_s)

    async def update_from_tensors(self, payloads: list[str], load_format: str | None, deadline_s: float) -> None:
        """`payloads`: one per tensor-parallel rank, base64 of a pickle of [(name, tensor)].

        The cache isn't flushed here: with requests under way that would be refused after the weights have changed.
        """
        body = {
            "serialized_named_tensors": payloads,
            "load_format": load_format,
            "selector": "target",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._control("/update_weights_from_tensor", body, deadline_s)

    async def update_from_disk(self, folder: str, deadline_s: float) -> None:
        """Load a checkpoint folder."""
        body = {"model_path": folder, "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
        await self._control("/update_weights_from_disk", body, deadline_s)

    async def join_update_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str, deadline_s: float
    ) -> None:
        """Join a process group of torch.distributed whose rank 0 sends weights; returns when all have joined."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._control("/init_weights_update_group", body, deadline_s)

    async def leave_update_group(self, group: str, deadline_s: float) -> None:
        await self._control("/destroy_weights_update_group", {"group_name": group}, deadline_s)

    async def update_from_group(
        self, tensors: list[tuple[str, str, tuple[int, ...]]], group: str, deadline_s: float
    ) -> None:
        """Receive tensors (name, dtype, shape) by one broadcast each, in this order, from rank 0 of the group."""
        body = {
            "names": [name for name, _, _ in tensors],
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [list(shape) for _, _, shape in tensors],
            "group_name": group,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._control("/update_weights_from_distributed", body, deadline_s)

    async def set_version(self, version: str, deadline_s: float) -> None:
        """Label the weights. Without `abort_all_requests: false` it would end all requests."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._control("/update_weight_version", body, deadline_s)

    async def release_memory(self, tags: list[str], deadline_s: float) -> None:
        """Give device memory back: of kv_cache, weights, cuda_graph. The server must be idle or paused."""
        await self._control("/release_memory_occupation", {"tags": tags}, deadline_s)

    async def resume_memory(self, tags: list[str], deadline_s: float) -> None:
        """Take it again. What it held is undefined until weights are synced."""
        await self._control("/resume_memory_occupation", {"tags": tags}, deadline_s)

    # ------------------------------------------------------------------------------------------ HTTP

    async def _control(self, path: str, body: Mapping[str, Any], deadline_s: float) -> None:
        """A POST whose answer means nothing but yes or no."""
        status, data = await self._call("POST", path, body, self._admin, Deadline(deadline_s, f"{self.name}: {path}"))
        if status != 200:
            raise EngineRefused(f"{self.name}: {path}: status {status}: {_words(data)}")
        try:
            answer = msgspec.json.decode(data) if data else None
        except msgspec.DecodeError:
            return  # some say yes in plain text
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineRefused(f"{self.name}: {path}: {_words(data)}")

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], deadline_s: float
    ) -> dict[str, Any]:
        status, data = await self._call(method, path, body, headers, Deadline(deadline_s, f"{self.name}: {path}"))
        if status != 200:
            raise EngineRefused(f"{self.name}: {path}: status {status}: {_words(data)}")
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise IntegrityError(f"{self.name}: {path}: the answer isn't JSON: {error}") from error

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], deadline: Deadline
    ) -> tuple[int, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        own = {**headers, "Content-Type": "application/json"} if data is not None else headers
        try:
            async with asyncio.timeout(deadline.remaining_s):
                async with self._http.request(method, self._base + path, data=data, headers=own) as answer:
                    return answer.status, await answer.read()
        except TimeoutError:
            raise deadline.error() from None
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{self.name}: {path}: {type(error).__name__}: {error}") from error


def _words(data: bytes) -> str:
    """What the server says is wrong; its errors come as a text, or as an object with a message."""
    try:
        answer: Any = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace").strip()[:_TEXT_CHARS]
    if isinstance(answer, dict):
        error = answer.get("error", answer.get("message", answer.get("detail", answer)))
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:_TEXT_CHARS]
