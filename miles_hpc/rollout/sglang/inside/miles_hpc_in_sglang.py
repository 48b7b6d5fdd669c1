"""Runs inside SGLang's processes: load weights from a staging file, then compare every live parameter with it.

    engine's host process                      each of the server's ranks
    staging file, order ──── update_weights_from_tensor(load_format = this module) ────▶ load(model, [order])
                         ◀─── verdict of rank r, a file ────────────────────────────────╯

SGLang answers "success" when its loader raised nothing. That leaves out a tensor that no parameter took, a parameter
that no tensor reached, and a copy that went wrong. So the model loads the same tensors a second time, with every copy
into a live parameter turned into a comparison: whatever fuses, slices or renames between a checkpoint and the
parameters of this rank is the model's own code, and is checked without being known here.

Reached by `--custom-weight-loader miles_hpc_in_sglang.load`, a documented option of SGLang, through PYTHONPATH. Imports
nothing of the project: SGLang lives in an environment of its own. Nothing raises: SGLang's scheduler would end.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["load"]

_MOST_NAMES = 5  # of what is wrong, in a verdict


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom loader. The one tensor is the path of the order, UTF-8 as uint8. The order, JSON:

        check     false: load; true: compare, and change nothing
        staging   path of the file that holds the tensors' bytes, each C-contiguous
        tensors   [name, dtype, shape, byte offset], by the names of a Hugging Face checkpoint
        verdict   where this rank's verdict goes, with {rank} for its number
        token     comes back in the verdict

    The verdict, JSON, appears by rename: token, ok, error, compared (elements), unused (names of tensors that no
    parameter of this rank took), seconds.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a forward that was launched before the pause still reads the weights
    order = json.loads(Path(bytes(named_tensors[0][1].cpu().numpy()).decode()).read_bytes())
    verdict: dict[str, Any] = {"token": order["token"], "ok": False, "error": "", "compared": 0, "unused": []}
    try:
        with _staged(order) as tensors:
            began = time.perf_counter()
            if order["check"]:
                comparison = _Comparison(model, tensors)
                with comparison, _in_this_thread():
                    _load(model, tensors)
                verdict.update(comparison.verdict())
            else:
                _load(model, tensors)
                verdict["ok"] = True
            verdict["seconds"] = time.perf_counter() - began
    except Exception as error:
        verdict["error"] = f"{type(error).__name__}: {error}"
    _publish(order["verdict"].format(rank=_rank()), verdict)


def _load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    model.load_weights(iter(tensors.items()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


@contextlib.contextmanager
def _staged(order: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The staged tensors, as views of the mapped file: a rank reads the parts that its parameters take."""
    with open(order["staging"], "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # A private mapping is writable for torch, which knows no read-only tensors, and never changes the file.
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    tensors = {}
    for name, dtype, shape, offset in order["tensors"]:
        kind = getattr(torch, dtype)
        count = 1
        for extent in shape:
            count *= extent
        tensors[name] = torch.frombuffer(mapped, dtype=kind, count=count, offset=offset).reshape(shape)
    yield tensors  # the mapping goes with the last tensor


def _publish(path: str, verdict: dict[str, Any]) -> None:
    temporary = Path(f"{path}.{os.getpid()}")
    temporary.write_text(json.dumps(verdict))
    temporary.rename(path)


class _Inline(concurrent.futures.Executor):
    """A dispatch mode sees its own thread only; some models load in a pool."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _in_this_thread() -> contextlib.AbstractContextManager[Any]:
    return mock.patch.object(concurrent.futures, "ThreadPoolExecutor", _Inline)


class _Comparison(TorchDispatchMode):
    """Turns writes into live parameters into comparisons, and counts which elements were compared."""

    _WRITES = ("copy_", "fill_", "zero_")

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._parameters: dict[int, str] = {}  # storage -> name of a parameter that owns it
        self._sizes: dict[str, int] = {}
        self._done: dict[str, set[tuple[Any, ...]]] = {}
        self._differ: dict[str, None] = {}
        for name, parameter in model.named_parameters():
            storage = parameter.untyped_storage().data_ptr()
            if storage not in self._parameters:  # a tied one is the same memory
                self._parameters[storage] = name
                self._sizes[name] = parameter.numel()
                self._done[name] = set()
        regions = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, n) for n, t in tensors.items())
        self._starts = [start for start, _, _ in regions]
        self._regions = regions
        self._unused = {start: name for start, _, name in regions}  # a tied one has two names
        self._compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self._WRITES and args and isinstance(args[0], torch.Tensor):
            parameter = self._parameters.get(args[0].untyped_storage().data_ptr())
            if parameter is not None:
                expected = args[1] if len(args) > 1 else 0
                with torch.utils._python_dispatch._disable_current_modes():
                    self._compare(parameter, args[0], expected)
                return args[0]
        self._note_sources(args)
        return func(*args, **(kwargs or {}))

    def _compare(self, parameter: str, live: torch.Tensor, expected: Any) -> None:
        if isinstance(expected, torch.Tensor):
            self._note_sources((expected,))
            wanted = expected.to(device=live.device, dtype=live.dtype).broadcast_to(live.shape)
        else:
            wanted = torch.full_like(live, expected)
        # By bits: a NaN is itself, and -0.0 isn't 0.0.
        if not torch.equal(_bits(live), _bits(wanted)):
            self._differ[parameter] = None
        where = (live.storage_offset(), tuple(live.shape), tuple(live.stride()))
        if where not in self._done[parameter]:
            self._done[parameter].add(where)
            self._compared += live.numel()

    def _note_sources(self, args: Any) -> None:
        """Which staged tensors are read, also where a model makes something of them before it copies."""
        for tensor in tree_leaves(args):  # some, such as cat, take lists
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.numel():
                i = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
                if i >= 0 and tensor.data_ptr() < self._regions[i][1]:
                    self._unused.pop(self._starts[i], None)

    def verdict(self) -> dict[str, Any]:
        missing = [n for n, size in self._sizes.items() if sum(_numel(w) for w in self._done[n]) < size]
        problems = []
        if self._differ:
            problems.append(f"{len(self._differ)} parameters differ from what was staged: {_some(self._differ)}")
        if missing:
            problems.append(f"{len(missing)} parameters were not loaded, or in part: {_some(missing)}")
        return {
            "ok": not problems,
            "error": "; ".join(problems),
            "compared": self._compared,
            "unused": list(self._unused.values()),
        }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


def _numel(where: tuple[Any, ...]) -> int:
    n = 1
    for extent in where[1]:
        n *= extent
    return n


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
