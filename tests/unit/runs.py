"""A small valid run for tests of loading, planning and submitting."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from miles_hpc.cluster.site import data_folder
from miles_hpc.core import toml
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.load import apply_overrides, load_site, parse

__all__ = ["make_gpu_run", "make_run", "make_site", "write_run"]

_TABLES: dict[str, Any] = {
    "name": "tiny",
    "site": "slurm_box",
    "model": {"tokenizer": "characters", "config": {"model_type": "qwen3", "max_position_embeddings": 512}},
    "groups": {
        "trainer": {"nodes": 2},
        "rollout": {"nodes": 2},
        "sandbox": {"nodes": 1},
    },
}


def make_run(*overrides: str) -> RunConfig:
    """The run, with `--set` overrides."""
    tables = copy.deepcopy(_TABLES)
    apply_overrides(tables, RunConfig, overrides)
    return parse(tables, RunConfig, "run.toml")


def make_gpu_run(site: SiteConfig, *overrides: str, gpus: int = 32) -> RunConfig:
    """A run with `gpus` GPUs for training and as many for rollout on whole nodes, with what the site wants besides."""
    per_node = max(partition.gpus_per_node for partition in site.partitions)
    nodes, ranks = gpus // max(1, per_node), max(1, per_node)
    cpus = max(1, site.sbatch.cpus_per_gpu_min)
    return make_run(
        *(f"groups.{role}.nodes={nodes}" for role in ("trainer", "rollout")),
        *(f"groups.{role}.gpus_per_node={per_node}" for role in ("trainer", "rollout")),
        f"groups.trainer.ranks_per_node={ranks}",
        f"groups.trainer.cpus_per_task={cpus}",
        f"groups.rollout.cpus_per_task={cpus * ranks}",
        "job.account=project",
        *([f"job.qos={site.qos[0].name}"] if "--qos" in site.sbatch.required else []),
        *overrides,
    )


def write_run(folder: Path, *lines: str) -> Path:
    """The run as folder/run.toml, with `lines` in front of it."""
    path = folder / "run.toml"
    path.write_text("\n".join((*lines, toml.dumps(_TABLES))))
    return path


def make_site(name: str = "slurm_box") -> SiteConfig:
    return load_site(name, [data_folder("site_configs")])
