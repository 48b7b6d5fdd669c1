"""How a server is started, what is sent to it, and the loader that runs inside it. No SGLang."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.types import ModelShape, WeightPiece
from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.sglang.checkpoint import architecture_override, checkpoint_tensors
from miles_hpc.rollout.sglang.settings import INSIDE, LOADER, SglangOptions, server_arguments, server_environment
from miles_hpc.rollout.sglang.staging import Staging

MOE = ModelShape(vocab_size=50, max_position_embeddings=64, moe_layers=(0,), n_experts=4, top_k=2)
DENSE = ModelShape(vocab_size=50, max_position_embeddings=64)


def spec(**changes: Any) -> EngineSpec:
    async def connect(address: str, deadline_s: float):
        raise NotImplementedError

    told = {"name": "e", "model_path": Path("/m"), "connect": connect, "slots": 4, "max_length": 32}
    return EngineSpec(**(told | changes))


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


# ------------------------------------------------------------------------------------------------ settings


def test_a_server_on_a_cpu() -> None:
    arguments = server_arguments(spec(), SglangOptions(python="p"), MOE, port=7)
    assert value(arguments, "--host") == "127.0.0.1" and value(arguments, "--port") == "7"
    assert value(arguments, "--load-format") == "dummy" and value(arguments, "--custom-weight-loader") == LOADER
    assert value(arguments, "--device") == "cpu" and "--enable-return-routed-experts" in arguments
    assert "--enable-return-routed-experts" not in server_arguments(spec(), SglangOptions(python="p"), DENSE, port=7)
    environment = server_environment(spec(threads=3), SglangOptions(python="p"), {"RANK": "1", "HOME": "/h"})
    assert environment["HOME"] == "/h" and "RANK" not in environment and environment["OMP_NUM_THREADS"] == "3"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1" and environment["PYTHONPATH"] == str(INSIDE)


def test_a_server_on_gpus_takes_as_many_as_it_is_wide() -> None:
    options = SglangOptions(python="p", tensor_parallel=4)
    arguments = server_arguments(spec(device="cuda:2"), options, DENSE, port=7)
    assert value(arguments, "--base-gpu-id") == "8" and value(arguments, "--tp-size") == "4"
    assert "--device" not in arguments and "--attention-backend" not in arguments
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(spec(device="cuda:2"), options, {})


def test_arguments_of_the_run_file_override_defaults() -> None:
    given = {"attention_backend": "triton", "grammar-backend": None, "cuda-graph-bs": [1, 2], "x": None}
    arguments = server_arguments(spec(), SglangOptions(python="p", args=given), DENSE, port=7)
    assert value(arguments, "--attention-backend") == "triton" and "--grammar-backend" not in arguments
    at = arguments.index("--cuda-graph-bs")
    assert arguments[at : at + 3] == ["--cuda-graph-bs", "1", "2"] and "--x" not in arguments


@pytest.mark.parametrize("name", ["pp-size", "dp_size", "nnodes", "speculative-algorithm"])
def test_what_updates_were_not_verified_with_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="aren't verified yet"):
        server_arguments(spec(), SglangOptions(python="p", args={name: 2}), DENSE, port=7)


def test_in_place_updates_need_batches_that_do_not_overlap() -> None:
    for pause, expected in (("in_place", True), ("abort", False)):
        arguments = server_arguments(spec(device="cuda:0"), SglangOptions(python="p", pause=pause), DENSE, port=7)
        assert ("--disable-overlap-schedule" in arguments) is expected


@pytest.mark.parametrize("name", ["host", "port", "api_key", "admin-api-key", "model-path", "config", "tp_size"])
def test_what_the_contract_needs_cannot_be_overridden(name: str) -> None:
    with pytest.raises(UserError, match="is set by the engine itself"):
        server_arguments(spec(), SglangOptions(python="p", args={name: 1}), DENSE, port=7)


def test_options_that_are_not_known_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'pause'"):
        SglangOptions.of({"python": "p", "puase": "abort"})
    with pytest.raises(UserError, match="expected in_place or abort"):
        SglangOptions.of({"python": "p", "pause": "retract"})
    with pytest.raises(UserError, match="expected cpu or cuda:N"):
        server_arguments(spec(device="tpu"), SglangOptions(python="p"), DENSE, port=7)


# ------------------------------------------------------------------------------------------------ names


def piece(name: str, *shape: int, dtype: str = "float32") -> WeightPiece:
    n = {"float32": 4, "bfloat16": 2}[dtype] * int(np.prod(shape))
    return WeightPiece(name=name, dtype=dtype, shape=shape, n_bytes=n, digest=b"")


def test_names_stay_and_experts_come_apart() -> None:
    e, i, h = 3, 2, 5
    pieces = [
        piece("model.embed_tokens.weight", 7, h),
        piece("model.layers.0.mlp.experts.gate_up_proj", e, 2 * i, h, dtype="bfloat16"),
        piece("model.layers.0.mlp.experts.down_proj", e, h, i, dtype="bfloat16"),
        piece("model.layers.1.mlp.down_proj.weight", h, i),
    ]
    found = {t.name: t for t in checkpoint_tensors(pieces, "qwen3_moe", tied=False)}
    assert len(found) == 1 + 3 * e + 1
    base = 7 * h * 4
    assert found["model.layers.0.mlp.experts.0.gate_proj.weight"].offset == base
    up = found["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert (up.shape, up.offset) == ((i, h), base + 2 * (2 * 2 * i * h) + 2 * i * h)
    down = found["model.layers.0.mlp.experts.1.down_proj.weight"]
    assert (down.shape, down.offset) == ((h, i), base + e * 2 * (2 * i * h) + 2 * h * i)
    assert found["model.layers.1.mlp.down_proj.weight"].offset == sum(p.n_bytes for p in pieces[:3])


def test_mixtral_has_names_of_its_own() -> None:
    pieces = [piece("model.layers.0.mlp.gate.weight", 4, 5), piece("model.layers.0.mlp.experts.gate_up_proj", 1, 4, 5)]
    names = [t.name for t in checkpoint_tensors(pieces, "mixtral", tied=False)]
    stem = "model.layers.0.block_sparse_moe"
    assert names == [f"{stem}.gate.weight", f"{stem}.experts.0.w1.weight", f"{stem}.experts.0.w3.weight"]


def test_a_tied_embedding_goes_under_both_names() -> None:
    found = checkpoint_tensors([piece("model.embed_tokens.weight", 7, 5), piece("x", 2)], "llama", tied=True)
    assert [(t.name, t.offset) for t in found] == [("model.embed_tokens.weight", 0), ("x", 140), ("lm_head.weight", 0)]


def test_a_config_without_its_class_is_completed() -> None:
    assert architecture_override({"model_type": "qwen3", "architectures": ["Other"]}) == {}
    override = architecture_override({"model_type": "qwen3_moe"})
    assert override == {"architectures": ["Qwen3MoeForCausalLM"]}
    arguments = server_arguments(spec(), SglangOptions(python="p"), MOE, port=7, model=override)
    assert json.loads(value(arguments, "--json-model-override-args")) == override
    with pytest.raises(UserError, match="model type 'x' none is known"):
        architecture_override({"model_type": "x"})


def test_experts_of_an_unknown_family_are_refused() -> None:
    with pytest.raises(UserError, match="'gpt_oss' aren't known"):
        checkpoint_tensors([piece("model.layers.0.mlp.experts.gate_up_proj", 2, 4, 5)], "gpt_oss", tied=False)


# ------------------------------------------------------------------------------------------------ the loader inside


@pytest.fixture(scope="module")
def inside() -> ModuleType:
    path = INSIDE / "miles_hpc_in_sglang.py"
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Fused(torch.nn.Module):
    """As a serving model: q and k in one parameter, a padded embedding, one half of a row by rank."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.qk = torch.nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.embedding = torch.nn.Parameter(torch.randn(8, 3, dtype=torch.bfloat16), requires_grad=False)
        self.row = torch.nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.ab = torch.nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.held: dict[str, torch.Tensor] = {}
        self.after = lambda: None

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for future in [pool.submit(self._load, name, tensor) for name, tensor in weights]:
                future.result()
        self.after()

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        if name in ("q", "k"):
            self.qk.data[2 * (name == "k") :].narrow(0, 0, 2).copy_(tensor)
        elif name == "embedding":
            self.embedding.data[:6].copy_(tensor)
            self.embedding.data[6:].fill_(0)
        elif name == "row":
            self.row.data.copy_(tensor.narrow(1, 2 * self.rank, 2))
        elif name in ("a", "b"):
            self.held[name] = tensor
            if len(self.held) == 2:
                self.ab.data.copy_(torch.cat([self.held["a"], self.held["b"]]))
                self.held.clear()


TENSORS = {
    "q": torch.arange(6.0).reshape(2, 3),
    "k": torch.arange(6.0).reshape(2, 3) + 10,
    "embedding": torch.arange(18.0).reshape(6, 3) / 7,
    "row": torch.arange(12.0).reshape(3, 4),
    "a": torch.ones(1, 2),
    "b": torch.full((1, 2), 2.0),
}


class Orders:
    """Orders over one staging, as the engine gives them."""

    def __init__(self, inside: ModuleType, tensors: dict[str, torch.Tensor] = TENSORS) -> None:
        self.inside = inside
        self.staging = Staging()
        pieces = [piece(name, *tensor.shape) for name, tensor in tensors.items()]
        self.staging.lay_out(pieces)
        data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
        self.staging.put(pieces, memoryview(data))
        self.tensors = [t for t in checkpoint_tensors(pieces, "x", tied=False)]

    def give(self, model: torch.nn.Module, *, check: bool):
        order = self.staging.order(self.tensors, "t", check=check)
        self.inside.load(model, [("miles_hpc.order", torch.frombuffer(bytearray(order.encode()), dtype=torch.uint8))])
        (verdict,) = self.staging.take_verdicts("t", 1)
        return verdict


@pytest.fixture
def orders(inside: ModuleType) -> Iterator[Orders]:
    made = Orders(inside)
    yield made
    made.staging.close()


def test_loading_then_comparing_finds_all_equal(orders: Orders) -> None:
    model = Fused(rank=1)
    assert orders.give(model, check=False).ok
    assert model.qk[3].tolist() == [13.0, 14.0, 15.0] and model.row.tolist() == [[2, 3], [6, 7], [10, 11]]
    verdict = orders.give(model, check=True)
    assert verdict.ok and verdict.error == "" and verdict.unused == []
    assert verdict.compared == 12 + 24 + 6 + 4


def test_comparing_changes_nothing_and_tells_what_differs(orders: Orders) -> None:
    model = Fused()
    orders.give(model, check=False)
    model.qk.data[3, 2] = 99.0
    model.embedding.data[7, 0] = 1.0  # in the padding
    verdict = orders.give(model, check=True)
    assert not verdict.ok and "2 parameters differ" in verdict.error and "qk" in verdict.error
    assert model.qk[3, 2] == 99.0


def test_the_sign_of_zero_counts(orders: Orders) -> None:
    model = Fused()
    orders.give(model, check=False)
    model.qk.data[0, 0] = -0.0
    assert "qk" in orders.give(model, check=True).error


def test_what_no_tensor_reached_and_what_no_parameter_took(inside: ModuleType) -> None:
    orders = Orders(
        inside,
        {
            "a": TENSORS["a"],
            "b": TENSORS["b"],
            "q": TENSORS["q"],
            "embedding": TENSORS["embedding"],
            "row": TENSORS["row"],
            "stray": TENSORS["k"],
        },
    )
    model = Fused()
    assert orders.give(model, check=False).ok  # SGLang would say success
    verdict = orders.give(model, check=True)
    assert not verdict.ok and "1 parameters were not loaded, or in part: qk" in verdict.error
    assert verdict.unused == ["stray"]
    orders.staging.close()


def test_a_model_that_fails_leaves_a_verdict_and_raises_nothing(orders: Orders) -> None:
    model = Fused()
    model.after = lambda: (_ for _ in ()).throw(ValueError("no such expert"))  # type: ignore[assignment]
    verdict = orders.give(model, check=False)
    assert not verdict.ok and verdict.error == "ValueError: no such expert"


def test_a_verdict_on_another_order_is_refused(orders: Orders) -> None:
    with pytest.raises(IntegrityError, match="rank 0 left no verdict"):
        orders.staging.take_verdicts("t", 1)
    Path(orders.staging.verdicts.format(rank=0)).write_text(
        json.dumps({"token": "old", "ok": True, "error": "", "compared": 0, "unused": []})
    )
    with pytest.raises(IntegrityError, match="another update"):
        orders.staging.take_verdicts("t", 1)


def test_staging_serves_sizes_that_change_and_leaves_nothing(inside: ModuleType) -> None:
    staging = Staging()
    folder = Path(staging.verdicts).parent
    for n in (3, 5, 2):
        pieces = [piece("a", n)]
        staging.lay_out(pieces)
        staging.put(pieces, memoryview(np.full(n, n, np.float32).tobytes()))
        with open(staging.path, "rb") as file:
            assert np.frombuffer(file.read(), np.float32).tolist() == [n] * n
    staging.close()
    staging.close()
    assert not folder.exists()
