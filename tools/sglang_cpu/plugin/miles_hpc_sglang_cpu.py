"""SGLang on a machine without a GPU: modules that only a GPU has become importable, and host memory isn't registered.

SGLang imports kernel packages whose wheels need CUDA even where `--device cpu` never calls them. A stand-in gives
names, so that imports pass, and raises as soon as one is called: what passes here is API and control flow, and no
kernel is replaced by something of ours. `install_stand_ins` runs at interpreter start (a .pth line in site-packages),
`activate` in SGLang's own processes (its entry-point group `sglang.srt.plugins`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
import types
from typing import Any

__all__ = ["activate", "install_stand_ins"]

#: Top-level packages without a CPU build.
ABSENT = frozenset({"sgl_kernel", "torchvision"})


class _NameType(type):
    """Of names that a stand-in gave: their attributes are names again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__name__}.{name}")


def _name(name: str) -> type:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{name} was called: it needs a GPU, and this machine has a stand-in for its import only")

    return _NameType(name, (), {"__init__": refuse})


class _StandIn(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _name(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


def install_stand_ins() -> None:
    """Last in the search path: a real package goes first."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def activate() -> None:
    """Called by SGLang in each of its processes. Does nothing where there is a GPU, but for the counted steps."""
    import torch

    _count_steps(os.environ.get("MILES_HPC_SGLANG_STEPS", ""), float(os.environ.get("MILES_HPC_SGLANG_STEP_S", "0")))

    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any, **__: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)  # without cudaHostRegister

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate  # the host cache of routed experts
    torch.cuda.memory_reserved = lambda *_, **__: 0  # asked by continue_generation(torch_empty_cache=true)
    torch.cuda.empty_cache = lambda: None


def _count_steps(path: str, seconds: float) -> None:
    """Every forward takes that much longer and then adds a byte to the file: a test sees a request under way, and can
    do something to it. SGLang's own numbers of running requests lag."""
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def counted(original: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        result = original(*args, **kwargs)
        with open(path, "ab") as file:
            file.write(b".")
        return result

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", counted, HookType.AROUND)
