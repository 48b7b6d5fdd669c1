"""Rules across fields of a run and its site. Pure but for looking whether the model's folder is there.

Each rule is a generator of complaints; `validate` raises the first one, so that a user reads one line at a time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles_hpc.core import registry
from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import asked_nodes, is_split, layout_complaints, layout_of, role_partition
from miles_hpc.core.ranges import NUMBERS, Range
from miles_hpc.core.site_limits import limit_complaints
from miles_hpc.core.site_rules import group_complaints
from miles_hpc.core.walltime import parse_time

__all__ = ["NUMBERS", "validate"]

_DOTTED = re.compile(r"[A-Za-z_][\w.]*[:.][A-Za-z_]\w*\Z")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")

_MODEL_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "max_position_embeddings",
)


def validate(run: RunConfig, site: SiteConfig) -> None:
    """Raise UserError for the first rule that the run breaks on this site."""
    for rule in (_name, _numbers, _names, _agent, _model, _lengths, _sglang, _eval, _control, _job):
        for complaint in rule(run, site):
            raise UserError(f"run '{run.name}': {complaint}")
    for complaint in _memory(run, site):
        raise UserError(f"run '{run.name}': {complaint}")
    placed: dict[str, SitePartition] = {}
    for role in ("trainer", "rollout", "sandbox"):
        group = getattr(run.groups, role)
        for complaint in _group(run, role, group, site):
            raise UserError(f"run '{run.name}': groups.{role}: {complaint}")
        if group.nodes and (partition := role_partition(run, site, role)) is not None:
            placed[role] = partition
    for complaint in limit_complaints(run, site, placed):
        raise UserError(f"run '{run.name}': {complaint}")


def _name(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    if not _RUN_NAME.match(run.name):
        yield "name: expected 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"


def _numbers(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    for key, allowed in NUMBERS.items():
        value: Any = run
        for part in key.split("."):
            value = getattr(value, part)
        complaint = "" if value is None else allowed.complaint(value)
        if complaint:
            yield f"{key} = {value}: {complaint}"


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


def _agent(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    path, options = run.rollout.custom_agent_function_path, run.rollout.agent_options
    if path and not _DOTTED.match(path):
        yield f"rollout.custom_agent_function_path: '{path}': expected module:function"
    if options and not path:
        yield "rollout.agent_options: there is no agent to give them to: set rollout.custom_agent_function_path"
    slots = run.rollout.engines_per_host * run.rollout.slots_per_engine
    if path and run.sessions.max_sessions < slots:
        yield (
            f"sessions.max_sessions = {run.sessions.max_sessions} with rollout.engines_per_host * "
            f"rollout.slots_per_engine = {slots}: each slot's agent has a session: raise it"
        )
    taken = sorted({"base_url", "prompt", "request_kwargs", "metadata", "api_key", "episode"} & set(options))
    if taken:
        yield f"rollout.agent_options: {', '.join(taken)}: an agent is given these anyway: use other names"


def _model(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    model = run.model
    if bool(model.path) == bool(model.config):
        both = "both are given" if model.path else "neither is given"
        yield f"model: {both}: expected either model.path (a folder) or model.config (a table)"
    if model.path and not (Path(model.path) / "config.json").is_file():
        yield f"model.path: no config.json in {model.path}: expected a Hugging Face model folder"
    if model.config and not isinstance(model.config.get("model_type"), str):
        yield "model.config: 'model_type' is missing: expected a Hugging Face model type such as \"qwen3\""
    yield from _sizes(model.config)
    if model.config and not model.tokenizer:
        yield 'model.tokenizer: needed when model.config describes the model: "characters" or a folder'
    if model.tokenizer not in ("", "characters") and not (Path(model.tokenizer) / "tokenizer.json").is_file():
        yield f'model.tokenizer: no tokenizer.json in {model.tokenizer}: expected a tokenizer folder or "characters"'


def _sizes(config: dict[str, Any]) -> Iterator[str]:
    """Sizes of a Hugging Face config, by the names that most model types share; absent ones have defaults."""
    for key in _MODEL_SIZES:
        size = config.get(key, 1)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 2**31 - 1:
            yield f"model.config.{key} = {size!r}: expected a whole number of at least 1"
    heads, shared = config.get("num_attention_heads", 0), config.get("num_key_value_heads", 1)
    if heads % shared:
        yield f"model.config.num_attention_heads = {heads}: expected a multiple of num_key_value_heads = {shared}"
    chosen, experts = config.get("num_experts_per_tok", 0), config.get("num_experts", 2**31)
    if chosen > experts:
        yield f"model.config.num_experts_per_tok = {chosen}: expected at most num_experts = {experts}"


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


def _sglang(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    if run.rollout.engine != "sglang":
        return
    width, gpus = run.sglang.num_gpus_per_engine, run.groups.rollout.gpus_per_node
    if gpus and width * run.rollout.engines_per_host > gpus:
        yield (
            f"rollout.engines_per_host = {run.rollout.engines_per_host} engines of "
            f"sglang.num_gpus_per_engine = {width}, but groups.rollout.gpus_per_node is {gpus}"
        )
    python = run.python.sglang or site.python.sglang or run.python.rollout or site.python.rollout or sys.executable
    packages = [*Path(python).parent.parent.glob("lib/python3*/site-packages")]
    if packages and not any((folder / "sglang").is_dir() for folder in packages):
        yield (
            f"rollout.engine = sglang: the environment of {python} has no package sglang: "
            "set python.sglang to the interpreter of one that has"
        )


def _eval(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    chosen = run.eval
    if chosen.engines_per_host >= run.rollout.engines_per_host:
        yield (
            f"eval.engines_per_host = {chosen.engines_per_host} of rollout.engines_per_host = "
            f"{run.rollout.engines_per_host}: at least one engine of a host is for training"
        )
    if chosen.engines_per_host and not chosen.n_episodes:
        yield f"eval.engines_per_host = {chosen.engines_per_host}, but eval.n_episodes = 0: they would serve nothing"
    if chosen.engines_per_host and chosen.max_in_flight > 1:
        yield (
            f"eval.max_in_flight = {chosen.max_in_flight}: expected 1, because engines that serve evaluations only "
            "hold one weight version at a time"
        )
    if chosen.engines_per_host and run.rollout.custom_agent_function_path:
        yield (
            f"eval.engines_per_host = {chosen.engines_per_host} with rollout.custom_agent_function_path: agents' "
            "sessions go to the engines for training alone: set it to 0"
        )
    if chosen.interval and not chosen.n_episodes:
        yield f"eval.interval = {chosen.interval}, but eval.n_episodes = 0: set how many prompts an evaluation has"


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
    yield from layout_complaints(run, site)
    if site.requires_account and not run.job.account:
        yield f"job.account: site '{site.name}' refuses jobs without an account: set it, or --set job.account=NAME"
    if run.job.time:  # "" = the partition's default
        yield from _time(run.job.time)
    sets = [env_set.name for env_set in site.env_sets]
    if run.job.env_set and run.job.env_set not in sets:
        yield f"job.env_set = \"{run.job.env_set}\": site '{site.name}' has {', '.join(sets) or 'no sets of variables'}"
    for key, text in (("time", run.job.time), ("account", run.job.account), ("qos", run.job.qos)):
        if not re.match(r"[A-Za-z0-9_.:@/+-]*\Z", text):
            yield f'job.{key} = "{text}": expected no spaces or quotes'
    for directive in run.job.extra_directives:
        if not re.match(r"--?[A-Za-z][^\n]*\Z", directive):
            yield f'job.extra_directives: {directive!r}: expected an sbatch option such as "--exclusive"'


def _time(text: str) -> Iterator[str]:
    try:
        seconds = parse_time(text)
    except UserError as error:
        if "at most" in str(error):
            yield f"job.time: {error}"
        else:
            yield f'job.time = "{text}": expected minutes, HH:MM:SS or D-HH:MM:SS, more than 0'
        return
    if seconds == 0:  # which is no limit for sbatch
        yield f'job.time = "{text}": expected minutes, HH:MM:SS or D-HH:MM:SS, more than 0'


def _group(run: RunConfig, role: str, group: GroupConfig, site: SiteConfig) -> Iterator[str]:
    lowest = 0 if role == "sandbox" else 1
    for key, value, allowed in (
        ("nodes", group.nodes, Range(lowest, 10**5)),
        ("spare_nodes", group.spare_nodes, Range(0, 1024)),
        ("gpus_per_node", group.gpus_per_node, Range(0, 1024)),
        ("cpus_per_task", group.cpus_per_task, Range(1, 65535)),
        ("ranks_per_node", group.ranks_per_node, Range(1, 1024)),
    ):
        complaint = allowed.complaint(value)
        if complaint:
            yield f"{key} = {value}: {complaint}"
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
    partition = role_partition(run, site, role)
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
    if partition.nodes and asked_nodes(group) > partition.nodes:
        yield _too_many("nodes", asked_nodes(group), partition.nodes, where, "nodes")
    yield from group_complaints(site, group)


def _memory(run: RunConfig, site: SiteConfig) -> Iterator[str]:
    """--mem carries over to later components and can't be taken back there (heterogeneous_jobs.html)."""
    if site.sbatch.mem in ("forbidden", "zero") or is_split(layout_of(run, site)):  # nobody states it, or everybody
        return
    earlier = ""
    for role in ("trainer", "rollout", "sandbox"):
        group: GroupConfig = getattr(run.groups, role)
        if group.nodes and earlier and not group.mem:
            yield f"groups.{role}.mem: needed because groups.{earlier}.mem is set, which Slurm would take for both"
        earlier = role if group.mem else earlier


def _too_many(key: str, asked: int, available: int, where: str, what: str) -> str:
    return f"{key} = {asked}, but {where} has {available} {what}"
