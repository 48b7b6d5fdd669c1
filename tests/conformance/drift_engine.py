"""An engine whose every answer is a function of all tokens that it saw: whoever has a sample can tell what it saw."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from miles_hpc.rollout.engine import EngineSpec
from miles_hpc.rollout.scripted import ScriptedEngine
from miles_hpc.rollout.session.tokenizer import ChatTokenizer

__all__ = ["Drifting", "build"]

TOKEN_DELAY_S = 0.002


class Drifting:
    """A script. What it plays is mostly no text that a tokenizer would split this way."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        special = {tokenizer.encode(text)[0] for text in tokenizer.special_tokens}
        self._ordinary = [i for i in range(tokenizer.vocab_size) if i not in special]
        self._stop = tokenizer.stop_ids[0]

    def __call__(self, session: str, input_ids: Any) -> list[int]:
        digest = hashlib.blake2b(np.ascontiguousarray(input_ids, "<i4").tobytes(), digest_size=24).digest()
        picks = np.frombuffer(digest, "<u2")
        ids = [self._ordinary[int(pick) % len(self._ordinary)] for pick in picks[: 4 + picks[0] % 8]]
        return [*ids, self._stop]


def build(spec: EngineSpec) -> ScriptedEngine:
    """For `rollout.engine` of a run file."""
    spec.options["token_delay_s"] = TOKEN_DELAY_S
    return ScriptedEngine(spec, script=Drifting(ChatTokenizer(spec.model_path, append_only=False)))
