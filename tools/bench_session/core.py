"""What a turn costs the session core, at short and at long histories. No peer, no HTTP, no engine.

| operation | what is timed |
|---|---|
| append | `prepare_after` and `commit` of one turn: template, tokenisation of the suffix, record |
| matched | `prepare` and `commit`: the same, and every message of the client's history is compared with the record |
| prompt | `input_ids()`: the whole prompt in one buffer, as an engine wants it |
| parse | decoding the client's request from JSON: what a server does before any of this |

A history has turns of about 250 tokens, 100 of them sampled, the others a tool's answer and what the template writes
around it; each timed turn is one more, appended to the same place. Figures are processor time of one thread, since the
machine may be shared; wall time stands beside it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np

from miles_hpc.core.types import FinishReason, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.core import Session
from miles_hpc.rollout.session.history import History, LinearHistory, TreeHistory
from miles_hpc.rollout.session.matching import load_matcher
from miles_hpc.rollout.session.template import HuggingFaceTemplate
from miles_hpc.rollout.session.tokenizer import ChatTokenizer
from miles_hpc.rollout.session.turn import Turn

__all__ = [
    "OPERATIONS",
    "SAMPLED_TOKENS",
    "SHAPES",
    "SIZES",
    "TURNS_PER_REPEAT",
    "Arm",
    "Bench",
    "core_summary",
    "measure_core",
]

SIZES = {"1k": 1_000, "64k": 64_000}
SHAPES = ("linear", "tree")
OPERATIONS = ("append", "matched", "prompt", "parse")
SAMPLED_TOKENS = 100
TURNS_PER_REPEAT = 30
_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "run", "description": "runs a command", "parameters": {}}}
]


@dataclass
class Arm:
    """Medians over the turns of each repeat, in microseconds."""

    operation: str
    shape: str
    size: str
    n_tokens: int
    cpu_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """For the JSON object."""
        cuts = statistics.quantiles(self.cpu_us, n=10) if len(self.cpu_us) > 1 else self.cpu_us * 9
        return {
            "operation": self.operation,
            "history": self.shape,
            "size": self.size,
            "history_tokens": self.n_tokens,
            "cpu_median_us": round(statistics.median(self.cpu_us), 2),
            "cpu_p10_us": round(cuts[0], 2),
            "cpu_p90_us": round(cuts[-1], 2),
            "wall_median_us": round(statistics.median(self.wall_us), 2),
            "medians_cpu_us": [round(value, 2) for value in self.cpu_us],
        }


class Bench:
    """One long conversation, and histories of any length made of its turns."""

    def __init__(self, tokenizer: ChatTokenizer, template: HuggingFaceTemplate, seed: int) -> None:
        self.template = template
        self._rng = Random(seed)
        self._stop = tokenizer.stop_ids[0]
        self._text = tokenizer.decode(tokenizer.encode("the tool said that a file is a call, then it ends\n" * 40)[:90])
        self._ordinary = tokenizer.encode("the tool said that a file is a call and a user wants another answer")
        self._turns: list[Turn] = []
        session = Session(template, TreeHistory(load_matcher("loose_tool_call"), max_turns=1 << 20))
        while not self._turns or self._turns[-1].n_tokens < max(SIZES.values()):
            prepared = (
                session.prepare_after(self._turns[-1], [self._answer()])
                if self._turns
                else session.prepare([{"role": "user", "content": self._text}], _TOOLS)
            )
            turn = session.commit(prepared, self._generation(), self._reply()).turn
            assert turn is not None
            self._turns.append(turn)

    def path(self, size: str) -> list[Turn]:
        """The turns of a history of about that many tokens."""
        return self._turns[: next(i for i, t in enumerate(self._turns) if t.n_tokens >= SIZES[size]) + 1]

    def measure(self, arm: Arm) -> None:
        """One repeat: the median of some turns goes to the arm."""
        path = self.path(arm.size)
        answer = self._answer()
        body = msgspec.json.encode({"messages": [*(m for t in path for m in t.messages), answer], "tools": _TOOLS})
        session = Session(self.template, _history(arm.shape, path))
        request = msgspec.json.decode(body)
        prepared = session.prepare(request["messages"], request["tools"])

        def append() -> None:
            session.commit(session.prepare_after(path[-1], [answer]), generation, reply)

        def matched() -> None:
            session.commit(session.prepare(request["messages"], request["tools"]), generation, reply)

        operations: dict[str, Callable[[], object]] = {
            "append": append,
            "matched": matched,
            "prompt": prepared.input_ids,
            "parse": lambda: msgspec.json.decode(body),
        }
        operation = operations[arm.operation]
        cpu, wall = [], []
        for _ in range(TURNS_PER_REPEAT):
            generation, reply = self._generation(), self._reply()
            wall_began, cpu_began = time.perf_counter_ns(), time.thread_time_ns()
            operation()
            cpu.append((time.thread_time_ns() - cpu_began) / 1e3)
            wall.append((time.perf_counter_ns() - wall_began) / 1e3)
        arm.cpu_us.append(statistics.median(cpu))
        arm.wall_us.append(statistics.median(wall))

    def _answer(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "c1", "content": f"{self._rng.random()} {self._text}"}

    def _reply(self) -> dict[str, Any]:
        arguments = json.dumps({"command": f"run {self._rng.random()}"})
        calls = [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}}]
        return {"role": "assistant", "content": self._text, "tool_calls": calls}

    def _generation(self) -> Generation:
        ids = [*self._rng.choices(self._ordinary, k=SAMPLED_TOKENS - 1), self._stop]
        return Generation(
            output_ids=np.asarray(ids, np.int32),
            log_probs=np.full(len(ids), -1, np.float32),
            versions=(VersionSpan(version=WeightVersion(1, 1), start=0, end=len(ids)),),
            finish_reason=FinishReason.STOP,
            routed_experts=None,
            cached_tokens=0,
        )


def _history(shape: str, path: list[Turn]) -> History:
    matcher = load_matcher("loose_tool_call")
    history: History = LinearHistory(matcher) if shape == "linear" else TreeHistory(matcher, max_turns=1 << 20)
    for turn in path:
        history.append(history.after(turn.parent), turn)
    return history


def measure_core(bench: Bench, repeats: int, rng: Random) -> list[Arm]:
    """All operations, histories and sizes, in random order within each repeat."""
    arms = [
        Arm(operation, shape, size, bench.path(size)[-1].n_tokens)
        for operation in OPERATIONS
        for shape in SHAPES
        for size in SIZES
    ]
    for _ in range(repeats):
        for arm in rng.sample(arms, len(arms)):
            bench.measure(arm)
    return arms


def core_summary(arms: list[Arm]) -> dict[str, float]:
    """Of linear and tree, the worse."""
    cost = {(arm.operation, arm.shape, arm.size): statistics.median(arm.cpu_us) for arm in arms}

    def worst(operation: str, size: str) -> float:
        return max(cost[operation, shape, size] for shape in SHAPES)

    return {
        "turns_per_s": round(1e6 / worst("append", "64k"), 1),
        "turn_cost_ratio_64k_over_1k": round(
            max(cost["append", shape, "64k"] / cost["append", shape, "1k"] for shape in SHAPES), 3
        ),
        "matched_turns_per_s": round(1e6 / worst("matched", "64k"), 1),
        "prompt_us_64k": round(worst("prompt", "64k"), 1),
        "parse_us_64k": round(worst("parse", "64k"), 1),
    }
