"""The evaluation of a checkpoint as a side job: export it, let the export play. Here because it takes two roles."""

from __future__ import annotations

from typing import Any

__all__ = ["evaluate_checkpoint"]


def evaluate_checkpoint(
    run_dir: str, step: int | None = None, n_episodes: int | None = None, device: str = "cpu", threads: int = 1
) -> dict[str, Any]:
    """Evaluate the newest complete checkpoint, or that of `step`, on held-out episodes of the run.

    The export stays in <run_dir>/exports. Returns what `evaluate_folder` does, with the step and the folder. Raises
    what both do.
    """
    from miles_hpc.rollout.evaluate import evaluate_folder
    from miles_hpc.trainer.export import export_checkpoint

    exported = export_checkpoint(run_dir, step)
    told = evaluate_folder(run_dir, exported["folder"], n_episodes, device, threads)
    return {"step": exported["step"], "folder": exported["folder"], **told}
