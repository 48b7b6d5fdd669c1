"""How many bytes and files a run will hold at once on its file system: an estimate from the run file alone. Pure.

Checkpoints dominate: weights and AdamW's two moments in float32 (trainer/state.py), one file and one generator state
per rank, `checkpoint.keep` of them and the one being written. Beside them lie the groups that no manifest covers yet
(payload and routed experts), and for the whole run an archive per weight version and per evaluation, logs and events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_hpc.core.config import RunConfig

__all__ = ["RunSize", "parameters", "run_size"]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FLOAT32 = 4
_STATE_COPIES = 3  # weights, exp_avg, exp_avg_sq
_ARCHIVE_BYTES_PER_TOKEN = 9  # token, loss mask, log-prob (dataflow/archive.py), uncompressed
_EXPERT_ID_BYTES = 2
_FILES_PER_CHECKPOINT = 3  # .metadata, trainer.json, the manifest
_FILES_PER_PROCESS = 2  # log, events


@dataclass(frozen=True)
class RunSize:
    """An upper estimate. `checkpoint_bytes` is one checkpoint, `largest_file_bytes` one rank's part of it."""

    parameters: int
    checkpoint_bytes: int
    largest_file_bytes: int
    total_bytes: int
    total_files: int


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of a transformer by its Hugging Face config, norms and biases left out; 0 when sizes are missing.

    Attention by heads and key-value heads, a gated MLP of three matrices, or `num_experts` of them with a router.
    """
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        vocab = int(config.get("vocab_size", 0))  # of a model made here it comes from a small tokenizer
        heads = int(config.get("num_attention_heads", 1))
        head_dim = int(config.get("head_dim") or hidden // heads)
        shared = int(config.get("num_key_value_heads") or heads)
        experts = next((int(config[key]) for key in _EXPERTS if config.get(key)), 0)
        inner = int(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0
        mlp = 3 * hidden * (inner if experts else int(config["intermediate_size"]))
    except (KeyError, TypeError, ValueError):
        return 0
    attention = 2 * hidden * head_dim * (heads + shared)
    per_layer = attention + (experts * mlp + hidden * experts if experts else mlp)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * per_layer + embeddings


def run_size(run: RunConfig, config: Mapping[str, Any]) -> RunSize | None:
    """The estimate; `config` is the model's Hugging Face config. None when that doesn't tell the model's size."""
    weights = parameters(config)
    if not weights:
        return None
    ranks = run.groups.trainer.nodes * run.groups.trainer.ranks_per_node
    copies = _STATE_COPIES + (1 if run.train.use_kl_loss else 0)
    checkpoint = weights * _FLOAT32 * copies
    kept = run.checkpoint.keep + 1

    rollout = run.rollout
    # Between two manifests, and in the pipeline; what a manifest covers is removed behind it.
    batches = run.checkpoint.interval_steps + rollout.max_admitted_batches + rollout.max_weight_staleness + 1
    groups = int(batches * rollout.rollout_batch_size) + 1
    group_tokens = rollout.n_samples_per_prompt * rollout.max_trajectory_tokens
    chosen = int(config.get("num_experts_per_tok") or 0) if rollout.routing_replay else 0
    per_token = _ARCHIVE_BYTES_PER_TOKEN + chosen * int(config["num_hidden_layers"]) * _EXPERT_ID_BYTES
    archive = rollout.n_steps * rollout.rollout_batch_size * group_tokens * _ARCHIVE_BYTES_PER_TOKEN
    held_out = run.eval
    evaluations = 2 + (rollout.n_steps // held_out.interval if held_out.interval else 0)
    evaluations = evaluations if held_out.n_episodes else 0
    prompt_tokens = held_out.n_samples_per_eval_prompt * rollout.max_trajectory_tokens
    archive += evaluations * held_out.n_episodes * prompt_tokens * _ARCHIVE_BYTES_PER_TOKEN

    processes = 2 + ranks + run.groups.rollout.nodes * (1 + rollout.engines_per_host) + run.groups.sandbox.nodes
    files = (
        kept * (2 * ranks + _FILES_PER_CHECKPOINT)
        + groups * (3 if chosen else 1)  # payload; the array's own file and at least one shard
        + rollout.n_steps
        + evaluations
        + held_out.max_in_flight * held_out.n_episodes  # payloads, until an evaluation is over
        + processes * _FILES_PER_PROCESS
    )
    return RunSize(
        parameters=weights,
        checkpoint_bytes=checkpoint,
        largest_file_bytes=-(-checkpoint // ranks),
        total_bytes=kept * checkpoint + groups * group_tokens * per_token + archive,
        total_files=files,
    )
