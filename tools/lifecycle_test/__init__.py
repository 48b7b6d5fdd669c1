"""Runs on the real Slurm box that clusters interrupt, each in the way its scenario is called, and the audit after it.

    python -m tools.lifecycle_test [SCENARIO ...] [--layout hetjob,split] [--keep] [--json FILE]

| scenario | what happens | what must hold besides the audit |
|---|---|---|
| requeue, follow-up | the run needs five allocations of a minute | nobody's hand between them |
| rollout-power, trainer-power, batch-power | power cut of a node | goes on by itself |
| two-lost | power cut of two nodes at the same moment | the same |
| preempt, -warm-start, -evaluation | a job of a partition with priority takes its nodes | saved before the end |
| cancel, scancel | miles-hpc cancel, or scancel of the job; a follow-up waits | nothing starts again; then resume |
| no-progress | every trainer start fails | the chain stops after two allocations and says why |
| full-disk | no space in the middle of a save | the older checkpoint stays valid; complete once there is space |
| notice | 20 notices, SIGTERM to steps or SIGUSR2 to the batch script | how long until the state is durable |
| bit-equal | deterministic mode, whole and in pieces with a killed rank | weights and optimizer bit-equal |
| spare | a trainer's and a rollout's node lose power, with --no-kill and spares | same allocation goes on |
| two-spares | the same at the same moment | same allocation goes on |
| slurmctld | stopped for 15 s, killed while the allocation ends | goes on meanwhile, and after it is back |
| orphan | the batch host loses power under --no-kill, where Slurm lets the job go on | agents see to the next start |

The audit: as many groups as asked for are trained, none lost, none twice on the final lineage; and no process
of ours is left on the box. Exit code 0 when all hold.
"""

from __future__ import annotations

from tools.lifecycle_test.scenarios import SCENARIOS, play
from tools.lifecycle_test.stage import LAYOUTS

__all__ = ["LAYOUTS", "SCENARIOS", "play"]
