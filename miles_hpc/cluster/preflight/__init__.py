"""Looking before node-hours are spent: is this cluster, this node, this run directory fit for a run."""

from __future__ import annotations

from miles_hpc.cluster.preflight.contract import Check, Comparison, Context, Finding, Machine
from miles_hpc.cluster.preflight.submission import Scheduler, check_job, check_site

__all__ = ["Check", "Comparison", "Context", "Finding", "Machine", "Scheduler", "check_job", "check_site"]
