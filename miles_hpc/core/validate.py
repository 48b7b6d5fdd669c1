"""Rules across fields of a run and its site. Pure but for looking whether the model's folder is there.

Each rule is a generator of complaints; `validate` raises the first one, so that a user reads one line at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles_hpc.core import registry
from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition
from miles_hpc.core.errors import UserError

__all__ = ["partition_of", "validate"]

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_AT_LEAST_ONE = (
    "rollout.n_steps",
    "rollout.rollout_batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.engines_per_host",
    "rollout.slots_per_engine",
    "rollout.max_turns",
    "rollout.max_tokens_per_turn",
    "rollout.max_trajectory_tokens",
    "rollout.max_group_attempts",
    "train.row_tokens",
    "train.threads",
    "checkpoint.interval_steps",
    "checkpoint.keep",
    "job.max_allocations",
)
_POSITIVE = (
    "rollout.temperature",
    "rollout.top_p",
    "rollout.trajectory_deadline_s",
    "rollout.sandbox_timeout_s",
    "train.lr",
    "control.heartbeat_interval_s",
    "control.lost_after_s",
    "control.lease_s",
    "control.connect_deadline_s",
    "control.start_deadline_s",
    "control.call_deadline_s",
    "control.step_deadline_s",
)


def validate(run: RunConfig, site: SiteConfig) -> None:
    """Raise UserError for the first rule that the run breaks on this site."""
    for rule in (_name, _numbers, _names, _model, _lengths, _control, _job):
        for complaint in rule(run, site):
            raise UserError(f"run '{run.name}': {complaint}")
    for complaint in _memory(run):
        raise UserError(f"run '{run.name}': {complaint}")
    for role in ("trainer", "rollout", "sandbox"):
        for complaint in _group(role, getattr(run.groups, role), site):
            raise UserError(f"run '{run.name}': groups.{role}: {complaint}")


def partition_of(site: SiteConfig, role: str, group: GroupConfig) -> SitePartition | None:
    """The partition that a group goes to: its own choice, or the first that the site lists for the role."""
    for partition in site.partitions:
        if partition.name == group.partition if group.partition else role in partition.roles:
            return partition
    return None


def _name(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    if not _RUN_NAME.match(run.name):
        yield "name: expected 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"


def _numbers(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    for key in _AT_LEAST_ONE:
        section, _, field = key.partition(".")
        value = getattr(getattr(run, section), field)
        if value < 1:
            yield f"{key} = {value}: expected at least 1"
    for key in _POSITIVE:
        section, _, field = key.partition(".")
        value = getattr(getattr(run, section), field)
        if not value > 0:
            yield f"{key} = {value}: expected more than 0"
    if run.rollout.top_p > 1:
        yield f"rollout.top_p = {run.rollout.top_p}: expected at most 1"
    if run.rollout.max_weight_staleness < 0:
        yield f"rollout.max_weight_staleness = {run.rollout.max_weight_staleness}: expected 0 or more"
    if run.rollout.max_admitted_batches < 1:
        yield f"rollout.max_admitted_batches = {run.rollout.max_admitted_batches}: expected at least 1 to fill a batch"


def _names(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    chosen = (
        ("rollout.engine", "engine", run.rollout.engine),
        ("train.backend", "backend", run.train.backend),
        ("environment.name", "environment", run.environment.name),
    )
    for key, kind, name in chosen:
        known = registry.names(kind)
        if name not in known and ":" not in name:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(known)} or module:attribute"
            yield f"{key}: no {kind} named '{name}': {hint}"


def _model(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    model = run.model
    if bool(model.path) == bool(model.config):
        both = "both are given" if model.path else "neither is given"
        yield f"model: {both}: expected either model.path (a folder) or model.config (a table)"
    if model.path and not (Path(model.path) / "config.json").is_file():
        yield f"model.path: no config.json in {model.path}: expected a Hugging Face model folder"
    if model.config and not isinstance(model.config.get("model_type"), str):
        yield "model.config: 'model_type' is missing: expected a Hugging Face model type such as \"qwen3\""
    if model.config and not model.tokenizer:
        yield 'model.tokenizer: needed when model.config describes the model: "characters" or a folder'
    if model.tokenizer not in ("", "characters") and not (Path(model.tokenizer) / "tokenizer.json").is_file():
        yield f'model.tokenizer: no tokenizer.json in {model.tokenizer}: expected a tokenizer folder or "characters"'


def _lengths(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    longest = run.rollout.max_trajectory_tokens
    if run.train.row_tokens < longest:
        yield (
            f"train.row_tokens = {run.train.row_tokens} is less than rollout.max_trajectory_tokens = {longest}: "
            "the longest trajectory must fit into one row"
        )
    if run.train.max_tokens_per_microbatch < run.train.row_tokens:
        yield (
            f"train.max_tokens_per_microbatch = {run.train.max_tokens_per_microbatch} is less than "
            f"train.row_tokens = {run.train.row_tokens}: a microbatch holds at least one row"
        )
    positions = _model_config(run).get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        yield (
            f"rollout.max_trajectory_tokens = {longest} is more than the model's max_position_embeddings = {positions}"
        )


def _model_config(run: RunConfig) -> dict[str, Any]:
    if not run.model.path:
        return run.model.config
    try:
        config = json.loads((Path(run.model.path) / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"run '{run.name}': model.path: can't read {run.model.path}/config.json: {error}") from error
    return config if isinstance(config, dict) else {}


def _control(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    control = run.control
    if control.lost_after_s <= control.heartbeat_interval_s:
        yield (
            f"control.lost_after_s = {control.lost_after_s} must be more than "
            f"control.heartbeat_interval_s = {control.heartbeat_interval_s}"
        )
    if control.lease_s <= control.heartbeat_interval_s:
        yield (
            f"control.lease_s = {control.lease_s} must be more than "
            f"control.heartbeat_interval_s = {control.heartbeat_interval_s}"
        )


def _job(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    if site.layout != "hetjob":
        yield f"site '{site.name}' asks for layout '{site.layout}': only 'hetjob' can be rendered"
    if site.requires_account and not run.job.account:
        yield f"job.account: site '{site.name}' refuses jobs without an account: set it, or --set job.account=NAME"
    if not 0 <= run.job.signal_s <= 65535:
        yield f"job.signal_s = {run.job.signal_s}: expected 0 to 65535 seconds (sbatch --signal)"
    for key, text in (("time", run.job.time), ("account", run.job.account), ("qos", run.job.qos)):
        if not re.match(r"[A-Za-z0-9_.:@/+-]*\Z", text):
            yield f'job.{key} = "{text}": expected no spaces or quotes'
    for directive in run.job.extra_directives:
        if not re.match(r"--?[A-Za-z][^\n]*\Z", directive):
            yield f'job.extra_directives: {directive!r}: expected an sbatch option such as "--exclusive"'


def _group(role: str, group: GroupConfig, site: SiteConfig) -> Iterator[str]:
    lowest = 0 if role == "sandbox" else 1
    for key, value, least in (
        ("nodes", group.nodes, lowest),
        ("gpus_per_node", group.gpus_per_node, 0),
        ("cpus_per_task", group.cpus_per_task, 1),
        ("ranks_per_node", group.ranks_per_node, 1),
    ):
        if value < least:
            yield f"{key} = {value}: expected at least {least}"
    if role != "trainer" and group.ranks_per_node != 1:
        yield f"ranks_per_node = {group.ranks_per_node}: only the trainer has ranks; other roles have one agent a node"
    if 0 < group.gpus_per_node < group.ranks_per_node:
        yield f"ranks_per_node = {group.ranks_per_node} but gpus_per_node = {group.gpus_per_node}: a GPU has one rank"
    if group.nodes == 0:
        return
    if site.scheduler == "none":
        if group.gpus_per_node > site.node.gpus:
            yield _too_many("gpus_per_node", group.gpus_per_node, site.node.gpus, f"site '{site.name}'", "GPUs")
        return
    partition = partition_of(site, role, group)
    if partition is None:
        names = ", ".join(p.name for p in site.partitions) or "none"
        wanted = f"no partition '{group.partition}'" if group.partition else f"no partition for role '{role}'"
        yield f"site '{site.name}' has {wanted}: its partitions are {names}; set groups.{role}.partition"
        return
    where = f"partition '{partition.name}' of site '{site.name}'"
    if group.gpus_per_node > partition.gpus_per_node:
        yield _too_many("gpus_per_node", group.gpus_per_node, partition.gpus_per_node, where, "GPUs per node")
    cpus = group.cpus_per_task * group.ranks_per_node
    if partition.cpus_per_node and cpus > partition.cpus_per_node:
        yield _too_many("cpus_per_task * ranks_per_node", cpus, partition.cpus_per_node, where, "CPUs per node")
    if partition.nodes and group.nodes > partition.nodes:
        yield _too_many("nodes", group.nodes, partition.nodes, where, "nodes")


def _memory(run: RunConfig) -> Iterator[str]:
    """--mem carries over to later components and can't be taken back there (heterogeneous_jobs.html)."""
    earlier = ""
    for role in ("trainer", "rollout", "sandbox"):
        group: GroupConfig = getattr(run.groups, role)
        if group.nodes and earlier and not group.mem:
            yield f"groups.{role}.mem: needed because groups.{earlier}.mem is set, which Slurm would take for both"
        earlier = role if group.mem else earlier


def _too_many(key: str, asked: int, available: int, where: str, what: str) -> str:
    return f"{key} = {asked}, but {where} has {available} {what}"
