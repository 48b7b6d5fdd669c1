"""All scenarios by name, and how one is played."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_hpc.core.errors import MilesError
from tools.lifecycle_test.allocations import bit_equal, cancel, five, no_progress, notice, preempt, preempt_in
from tools.lifecycle_test.losses import full_disk, orphan, power, slurmctld, spare, two_lost, two_spares
from tools.lifecycle_test.stage import Stage, stage_for

__all__ = ["SCENARIOS", "Scenario", "play"]


@dataclass(frozen=True)
class Scenario:
    """What happens, on a box of which size."""

    play: Callable[[Stage], None]
    nodes: str = "trainer:2,rollout:2,sandbox:1"  # one more than the run takes for each that is lost
    follow_up: bool = False  # at a site where jobs aren't requeued


SCENARIOS: dict[str, Scenario] = {
    "requeue": Scenario(five),
    "follow-up": Scenario(five, follow_up=True),
    "rollout-power": Scenario(power("rollout"), "trainer:2,rollout:3,sandbox:1"),
    "trainer-power": Scenario(power("trainer"), "trainer:3,rollout:2,sandbox:1"),
    "batch-power": Scenario(power("batch"), "trainer:3,rollout:2,sandbox:1"),
    "two-lost": Scenario(two_lost, "trainer:3,rollout:3,sandbox:1"),
    "preempt": Scenario(preempt),
    "preempt-warm-start": Scenario(preempt_in("warm start")),
    "preempt-evaluation": Scenario(preempt_in("evaluation")),
    "cancel": Scenario(cancel, follow_up=True),
    "scancel": Scenario(functools.partial(cancel, plainly=True), follow_up=True),
    "no-progress": Scenario(no_progress),
    "full-disk": Scenario(full_disk),
    "spare": Scenario(spare, "trainer:3,rollout:3,sandbox:2"),
    "two-spares": Scenario(two_spares, "trainer:3,rollout:3,sandbox:2"),
    "orphan": Scenario(orphan, "trainer:4,rollout:2,sandbox:2"),
    "slurmctld": Scenario(slurmctld),
    "notice": Scenario(notice),
    "bit-equal": Scenario(bit_equal),
}


def play(name: str, layout: str, *, keep: bool = False) -> dict[str, Any]:
    """One scenario; returns what was seen. Raises MilesError when something doesn't hold."""
    began = time.monotonic()
    scenario = SCENARIOS[name]
    with stage_for(scenario.nodes, layout, follow_up=scenario.follow_up, keep=keep) as stage:
        scenario.play(stage)
        stage.seen.setdefault("audit", None)
        stage.seen["audit"] = stage.seen["audit"] or stage.audit()
        deadline = time.monotonic() + 10
        while (left := stage.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.3)
        if left:
            raise MilesError(f"left behind: {left}")
    return {"scenario": name, "layout": layout, "seconds": round(time.monotonic() - began, 1), **stage.seen}
