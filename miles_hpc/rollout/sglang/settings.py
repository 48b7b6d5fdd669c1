"""How a server is started: from the engine's spec to SGLang's arguments and environment. Pure.

What must be so for the contract is fixed here and can't be overridden: where it listens, what it loads, how it labels
weights. Everything else is a default, which `[sglang] args` of the run file overrides under SGLang's own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ModelShape
from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.sglang.api import NO_VERSION

__all__ = ["INSIDE", "LOADER", "SglangOptions", "server_arguments", "server_environment"]

#: On the server's PYTHONPATH; holds the one module of ours that runs in its processes.
INSIDE = Path(__file__).parent / "inside"
LOADER = "miles_hpc_in_sglang.load"

#: SGLang decides some things by memory that a small test machine doesn't have.
_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "sleep-on-idle": True,  # else a scheduler without work takes half a core
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.3,
}

_OWN = ("api-key", "admin-api-key", "config", "tensor-parallel-size")
_NOT_YET = ("pp-size", "pipeline-parallel-size", "dp-size", "data-parallel-size", "nnodes", "node-rank")

#: SGLang refuses inputs that fill its context up to a few tokens; the engine itself bounds input and output.
_RESERVED = 8

#: Of other programs in the same allocation; torch.distributed would take them for its own.
_FOREIGN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """`EngineSpec.options` of this engine.

    `python` is the interpreter of SGLang's own environment. `pause` is how requests under way stand an update: in_place
    keeps their cache; abort ends them, and the engine continues each from its tokens. `check` compares all live
    parameters with what was sent. `tensor_parallel` is the number of devices of the engine, from the spec's on.
    """

    python: str
    args: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel: int = 1
    pause: str = "in_place"
    check: bool = True
    routed_experts: bool = True
    memory_saver: bool = False  # its memory can be released and resumed
    log: Path | None = None  # of the server
    start_deadline_s: float = 600.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SglangOptions:
        """From a spec's options; raises UserError for one that isn't known."""
        known = list(cls.__dataclass_fields__)
        for name in options:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise UserError(f"sglang option '{name}': expected one of {', '.join(known)}{hint}")
        made = cls(**options)
        if made.pause not in ("in_place", "abort"):
            # Under retract the rows of routed experts change owner (SGLang keeps them by cache slot).
            raise UserError(f"sglang option pause = '{made.pause}': expected in_place or abort")
        return made


def server_arguments(
    spec: EngineSpec, options: SglangOptions, shape: ModelShape, *, port: int, model: Mapping[str, Any] | None = None
) -> list[str]:
    """Arguments of `python -m sglang.launch_server`, without the keys. Raises UserError for args that are fixed.

    `model` overrides keys of config.json.
    """
    fixed: dict[str, Any] = {
        "model-path": str(spec.model_path),
        "load-format": "dummy",  # a version is served only after a sync
        "skip-tokenizer-init": True,
        "host": "127.0.0.1",
        "port": port,
        "dtype": spec.dtype,
        "tp-size": options.tensor_parallel,
        "max-running-requests": spec.slots,
        "weight-version": NO_VERSION,
        "custom-weight-loader": LOADER,
        "skip-server-warmup": True,
    }
    defaults: dict[str, Any] = {}
    if model:
        fixed["json-model-override-args"] = json.dumps(model)
    if spec.max_length is not None:
        fixed["context-length"] = spec.max_length + _RESERVED
    if shape.n_experts and options.routed_experts:
        fixed["enable-return-routed-experts"] = True
    if options.memory_saver:
        fixed["enable-memory-saver"] = True
    if options.pause == "in_place":
        # With overlap a batch is under way when the pause begins: its tokens would get the label of the next weights.
        fixed["disable-overlap-schedule"] = True
    if spec.device == "cpu":
        defaults |= _CPU_DEFAULTS
        if spec.max_length is not None:
            defaults["max-total-tokens"] = max(4096, spec.slots * (spec.max_length + _RESERVED))
    else:
        fixed["base-gpu-id"] = _device_number(spec.device) * options.tensor_parallel
    given = {name.replace("_", "-"): value for name, value in options.args.items()}
    for name in given:
        if name in fixed or name in _OWN:
            raise UserError(f"[sglang] args: '{name}' is set by the engine itself: leave it out")
        if name in _NOT_YET or name.startswith("speculative-"):
            raise UserError(f"[sglang] args: '{name}': updates of such an engine aren't verified yet: leave it out")
    return _flags(defaults | given | fixed)


def _device_number(device: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise UserError(f"device '{device}': expected cpu or cuda:N")
    return int(number or "0")


def _flags(values: Mapping[str, Any]) -> list[str]:
    """true: the flag alone; false and null: left out; a list: several values."""
    flags: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name}")
        if isinstance(value, list | tuple):
            flags += map(str, value)
        elif value is not True:
            flags.append(str(value))
    return flags


def server_environment(spec: EngineSpec, options: SglangOptions, own: Mapping[str, str]) -> dict[str, str]:
    """The server's environment, from this process's `own`."""
    kept = {name: value for name, value in own.items() if name not in _FOREIGN}
    kept |= {
        "PYTHONPATH": str(INSIDE),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs are those of the distribution that was sampled from
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the reserve, where the model's length is used whole
    }
    if spec.device == "cpu":
        kept["SGLANG_USE_CPU_ENGINE"] = "1"
        if options.tensor_parallel > 1:  # it asks for the binding where it can't read the machine's NUMA nodes
            kept.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(options.tensor_parallel))))
    return kept
