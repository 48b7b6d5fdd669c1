"""An engine that a run file can name (`tests.conformance.scripted_engine:build`); starts without torch."""

from __future__ import annotations

from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.scripted import ScriptedEngine

__all__ = ["build"]


def build(spec: EngineSpec) -> ScriptedEngine:
    return ScriptedEngine(spec, script=lambda session_id, input_ids: [int(input_ids[-1]) + 1] * 50)
