"""Implementations by name: entry points of the group `miles_hpc` ("kind:name"), or a dotted path "module:attribute"."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

from miles_hpc.core.errors import UserError

__all__ = ["names", "resolve"]

# What ships with the project; also found when it runs from a source tree whose metadata is older.
_BUILTIN = {
    "environment:math": "miles_hpc.rollout.environments.math:MathEnvironment",
    "environment:shell": "miles_hpc.rollout.environments.shell:ShellEnvironment",
    "environment:terminal": "miles_hpc.rollout.environments.terminal:TerminalEnvironment",
    "engine:torch": "miles_hpc.rollout.torch_engine:TorchEngine",
    "engine:sglang": "miles_hpc.rollout.sglang.engine:SglangEngine",
    "engine:scripted": "miles_hpc.rollout.scripted:ScriptedEngine",
    "backend:fsdp": "miles_hpc.trainer.fsdp:FsdpBackend",
    "matcher:strict": "miles_hpc.rollout.session.matching:strict",
    "matcher:loose_tool_call": "miles_hpc.rollout.session.matching:loose_tool_call",
    "matcher:role_content_only": "miles_hpc.rollout.session.matching:role_content_only",
    "reward:dapo": "miles_hpc.rollout.reward.rules:dapo",
    "reward:deepscaler": "miles_hpc.rollout.reward.rules:deepscaler",
    "reward:deterministic_random": "miles_hpc.rollout.reward.rules:deterministic_random",
    "reward:exact_match": "miles_hpc.rollout.reward.rules:exact_match",
    "reward:f1": "miles_hpc.rollout.reward.rules:f1",
    "reward:gemma_math": "miles_hpc.rollout.reward.rules:gemma_math",
    "reward:gpqa": "miles_hpc.rollout.reward.rules:gpqa",
    "reward:math": "miles_hpc.rollout.reward.rules:math",
    "reward:random": "miles_hpc.rollout.reward.rules:random",
    "tool_parser:deepseek": "miles_hpc.rollout.session.tool_formats:deepseek",
    "tool_parser:glm45": "miles_hpc.rollout.session.tool_formats:glm45",
    "tool_parser:hermes": "miles_hpc.rollout.session.tool_formats:hermes",
    "tool_parser:llama3_json": "miles_hpc.rollout.session.tool_formats:llama3_json",
    "tool_parser:mistral": "miles_hpc.rollout.session.tool_formats:mistral",
    "tool_parser:none": "miles_hpc.rollout.session.tool_formats:none",
    "tool_parser:qwen25": "miles_hpc.rollout.session.tool_formats:hermes",
    "tool_parser:qwen3_coder": "miles_hpc.rollout.session.tool_formats:qwen3_coder",
}


def names(kind: str) -> list[str]:
    """All known names of a kind, sorted."""
    found = {k.split(":", 1)[1] for k in _BUILTIN if k.startswith(f"{kind}:")}
    for entry in entry_points(group="miles_hpc"):
        if entry.name.startswith(f"{kind}:"):
            found.add(entry.name.split(":", 1)[1])
    return sorted(found)


def resolve(kind: str, name: str) -> Any:
    """The object registered as `name`, imported now. Raises UserError with the nearest name."""
    target = _BUILTIN.get(f"{kind}:{name}")
    if target is None:
        for entry in entry_points(group="miles_hpc"):
            if entry.name == f"{kind}:{name}":
                return entry.load()
    if target is None and ":" in name:
        target = name
    if target is None:
        near = get_close_matches(name, names(kind), 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"no {kind} named '{name}': expected one of {', '.join(names(kind))} or module:attribute{hint}")
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{kind} '{name}': can't load {target}: {error}") from error
