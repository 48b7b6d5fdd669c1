"""From a run to the options of its engine: what one implementation needs and the others don't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_hpc.cluster.site import role_python
from miles_hpc.core.config import RunConfig
from miles_hpc.core.site import SiteConfig

__all__ = ["engine_options"]


def engine_options(run: RunConfig, site: SiteConfig, *, log: Path | None) -> dict[str, Any]:
    """`EngineSpec.options` for run.rollout.engine. `log`: for what an engine starts itself; None: its output."""
    if run.rollout.engine == "sglang":
        sglang = run.sglang
        return {
            "python": role_python(run, site, "sglang"),
            "tensor_parallel": sglang.num_gpus_per_engine,
            "pause": sglang.pause_generation_mode,
            "check": sglang.check_weights,
            "memory_saver": sglang.enable_memory_saver,
            "args": sglang.args,
            "routed_experts": run.rollout.routing_replay,
            "log": log,
            "start_deadline_s": 0.9 * run.control.start_deadline_s,  # it tells why before its agent gives it up
        }
    return {
        "batch_invariant": run.rollout.engine_batch_invariant,
        "step_interval_s": run.rollout.engine_step_interval_s,
    }
