"""An engine against transformers on this machine: does it serve what it was sent, and how fast.

    python -m tools.engine_check --engine sglang --python /envs/sglang/bin/python --device cuda:0 [--json]

A random Qwen3-MoE is staged as a trainer would, fetched and verified by the engine, sampled with many
requests at once, updated while they run, and scored by one forward of transformers in the same precision. The exit code
is 1 when the engine's tokens, rows or versions aren't what they must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.messages import WeightManifest
from miles_hpc.core.types import SamplingParams, WeightVersion
from miles_hpc.rollout.engine import EngineSpec, Generation, RolloutEngine
from miles_hpc.rollout.sglang.engine import SglangEngine

__all__ = ["main"]

_SECRET = bytes(32)


@dataclass(frozen=True)
class Sizes:
    """The model and the load."""

    layers: int
    hidden: int
    experts: int
    top_k: int
    vocab: int
    requests: int
    input_tokens: int
    output_tokens: int


SMALL = Sizes(2, 64, 8, 2, 256, 8, 32, 32)
LARGE = Sizes(24, 1024, 64, 8, 32_000, 128, 512, 512)


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine_check", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", default="sglang", choices=["sglang", "torch"])
    parser.add_argument("--python", default="", help="interpreter of the engine's own environment")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--dtype", default="", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="more of SGLang's arguments")
    parser.add_argument("--memory", action="store_true", help="give device memory back and take it again")
    parser.add_argument("--log", type=Path, default=None, help="of the server")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    sizes = SMALL if args.device == "cpu" else LARGE
    try:
        found = asyncio.run(_check(args, sizes))
    except UserError as error:
        print(f"engine_check: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else "\n".join(f"{k:28} {v}" for k, v in found.items()))
    return 0 if not found["wrong"] else 1


async def _check(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    import torch

    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    found: dict[str, Any] = {"engine": args.engine, "device": args.device, "dtype": dtype, "wrong": []}
    with tempfile.TemporaryDirectory(prefix="miles-hpc-check-") as text:
        folder = Path(text)
        models = [_model(folder, sizes, seed, dtype) for seed in (1, 2)]
        found["parameters"] = sum(p.numel() for p in models[0].parameters())
        source = await _Source.listen()
        spec = _spec(args, folder, source, sizes, dtype)
        engine = _engine(args.engine, spec)
        try:
            began = time.monotonic()
            await engine.start()
            if isinstance(engine, SglangEngine):
                found["updates_in_place"] = engine.state.can.updates_in_place
            found["start_s"] = round(time.monotonic() - began, 1)
            for number, model in enumerate(models, 1):
                source.stage(number, model)
            first = await source.sync(engine, 1)
            found["sync_s"], found["pause_s"] = round(first.total_s, 3), round(first.paused_s, 3)
            found["bytes"] = first.n_bytes
            prompts = np.random.default_rng(0).integers(0, sizes.vocab - 1, (sizes.requests, sizes.input_tokens))
            results, seconds = await _load(engine, prompts.astype(np.int32), sizes, "a")
            n_out = sum(len(r.output_ids) for r in results)
            found["requests"], found["output_tokens_per_s"] = len(results), round(n_out / seconds, 1)
            _check_rows(results, sizes, found["wrong"])
            model = models[0].to(args.device)
            with torch.inference_mode():
                differences = [_difference(model, p, r) for p, r in zip(prompts[:8], results[:8], strict=False)]
            found["mean_abs_logprob_difference"] = float(np.mean(np.concatenate(differences)))
            found["max_abs_logprob_difference"] = float(np.max(np.concatenate(differences)))
            model.to("cpu")
            running = asyncio.ensure_future(_load(engine, prompts[::-1].astype(np.int32), sizes, "b"))
            await asyncio.sleep(min(1.0, seconds / 4))
            second = await source.sync(engine, 2)
            found["pause_under_load_s"] = round(second.paused_s, 3)
            results, _ = await running
            _check_rows(results, sizes, found["wrong"])
            steps = [[s.version.step for s in r.versions] for r in results]
            found["requests_with_two_versions"] = sum(s == [1, 2] for s in steps)
            if not all(s in ([1], [2], [1, 2]) for s in steps):
                found["wrong"].append("versions out of order")
            if args.memory:
                await _give_back(engine, source, models[1].to(args.device), prompts[0].astype(np.int32), sizes, found)
        finally:
            await engine.close()
            await source.close()
    return found


async def _give_back(
    engine: RolloutEngine,
    source: _Source,
    model: Any,
    prompt: npt.NDArray[np.int32],
    sizes: Sizes,
    found: dict[str, Any],
) -> None:
    """Everything given back with a request under way; weights again, a sync, the cache again; then it goes on."""
    import torch

    waiting = asyncio.ensure_future(_load(engine, prompt[None], sizes, "m"))
    await asyncio.sleep(0.5)
    before, began = _device_used_gb(), time.monotonic()
    await engine.release_memory(["kv_cache", "weights"], deadline_s=120.0)
    found["release_s"], found["device_gb_before"] = round(time.monotonic() - began, 2), before
    found["device_gb_released"] = _device_used_gb()
    began = time.monotonic()
    await engine.resume_memory(["weights"], deadline_s=120.0)
    await source.sync(engine, 2)
    await engine.resume_memory(["kv_cache"], deadline_s=120.0)
    found["resume_and_sync_s"], found["device_gb_resumed"] = round(time.monotonic() - began, 2), _device_used_gb()
    results, _ = await waiting
    _check_rows(results, sizes, found["wrong"])
    after, _ = await _load(engine, prompt[None], sizes, "n")
    with torch.inference_mode():
        found["mean_abs_logprob_difference_after"] = float(np.mean(_difference(model, prompt, after[0])))


def _device_used_gb() -> float | None:
    """Memory in use on the first GPU by all processes; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return round((total - free) / 1e9, 2)


def _model(folder: Path, sizes: Sizes, seed: int, dtype: str) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        moe_intermediate_size=sizes.hidden // 2,
        num_hidden_layers=sizes.layers,
        num_attention_heads=max(4, sizes.hidden // 64),
        num_key_value_heads=2,
        head_dim=64 if sizes.hidden >= 512 else 16,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(config).to(getattr(torch, dtype)).eval()


def _spec(args: argparse.Namespace, folder: Path, source: _Source, sizes: Sizes, dtype: str) -> EngineSpec:
    options: dict[str, Any] = {}
    if args.engine == "sglang":
        given = dict(text.partition("=")[::2] for text in args.arg)
        options = {
            "python": args.python or sys.executable,
            "tensor_parallel": args.tensor_parallel,
            "args": {name: {"true": True, "false": False}.get(value, value) for name, value in given.items()},
            "log": args.log,
            "memory_saver": args.memory,
        }
    return EngineSpec(
        name="engine",
        model_path=folder,
        connect=source.connect,
        slots=sizes.requests,
        max_length=sizes.input_tokens + sizes.output_tokens,
        dtype=dtype,
        device=args.device,
        threads=2,
        options=options,
    )


def _engine(name: str, spec: EngineSpec) -> RolloutEngine:
    from miles_hpc.core.registry import resolve

    engine: RolloutEngine = resolve("engine", name)(spec)
    return engine


class _Source:
    """A weight source in this process, over the project's transport."""

    def __init__(self) -> None:
        from miles_hpc.weights.broadcast import WeightSource

        self._source = WeightSource()
        self._manifests: dict[int, WeightManifest] = {}

    @classmethod
    async def listen(cls) -> _Source:
        made = cls()
        made._listener = await made._transport("weights").listen(made._source.handle)  # type: ignore[attr-defined]
        return made

    @staticmethod
    def _transport(role: str) -> Any:
        from miles_hpc.control.opening import open_transport
        from miles_hpc.core.transport import Credentials, PeerIdentity

        identity = PeerIdentity(role=role, name=role, host="here", pid=1, attempt=1, term=1)
        return open_transport("loopback", Credentials(secret=_SECRET, identity=identity))

    async def connect(self, address: str, deadline_s: float) -> Any:
        return await self._transport("engine").connect(address, deadline_s=deadline_s)

    def stage(self, step: int, model: Any) -> None:
        from miles_hpc.weights.bucket import tensor_bytes

        @dataclass(frozen=True)
        class Tensor:
            name: str
            dtype: str
            shape: tuple[int, ...]
            data: memoryview

        tensors = [
            Tensor(n, str(p.dtype).removeprefix("torch."), tuple(p.shape), tensor_bytes(p))
            for n, p in model.named_parameters()
        ]
        self._manifests[step] = self._source.stage(WeightVersion(1, step), tensors)

    async def sync(self, engine: RolloutEngine, step: int) -> Any:
        digest = self._manifests[step].plan_digest
        return await engine.sync(WeightVersion(1, step), self._listener.address, digest, deadline_s=600.0)  # type: ignore[attr-defined]

    async def close(self) -> None:
        await self._listener.close()  # type: ignore[attr-defined]


async def _load(
    engine: RolloutEngine, prompts: npt.NDArray[np.int32], sizes: Sizes, name: str
) -> tuple[list[Generation], float]:
    sampling = SamplingParams(max_new_tokens=sizes.output_tokens)
    began = time.monotonic()
    work = (
        engine.generate(f"{name}{i}", f"{name}{i}", prompt, sampling, routed_experts_start=0, deadline_s=600.0)
        for i, prompt in enumerate(prompts)
    )
    return await asyncio.gather(*work), time.monotonic() - began


def _check_rows(results: list[Generation], sizes: Sizes, wrong: list[str]) -> None:
    """A row for each token but the last, of every MoE layer, without an expert twice."""
    for result in results:
        n = sizes.input_tokens + len(result.output_ids) - 1
        rows = result.routed_experts
        if rows is None or rows.shape != (n, sizes.layers, sizes.top_k):
            wrong.append(
                f"routed experts {None if rows is None else rows.shape}: expected {(n, sizes.layers, sizes.top_k)}"
            )
        elif (np.diff(np.sort(rows, -1), axis=-1) == 0).any():
            wrong.append("a token went to one expert twice")


def _difference(model: Any, prompt: npt.NDArray[np.int32], result: Generation) -> npt.NDArray[np.float64]:
    """|engine's log-prob - one forward's| of each output token."""
    import torch

    tokens = np.concatenate((prompt, result.output_ids)).astype(np.int64)
    ids = torch.from_numpy(tokens)[None].to(model.device)
    log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
    n = len(result.output_ids)
    mine = log_probs[-n - 1 : -1].gather(-1, ids[0, -n:, None])[:, 0].double().cpu().numpy()
    return np.abs(mine - result.log_probs.astype(np.float64))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MilesError as error:
        print(f"engine_check: error: {error}", file=sys.stderr)
        sys.exit(1)
