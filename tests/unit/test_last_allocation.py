"""The end of an allocation: the next one is asked for while job.max_allocations allows one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

import miles_hpc.controller.steps
import miles_hpc.controller.supervisor
from launchers import supervisor
from miles_hpc.cluster.submit import prepare
from miles_hpc.core import exits
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_run, make_site


class FakeSlurm:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.requeued: list[int] = []

    def remaining_s(self, job_id: int) -> float:
        return 600.0

    def requeue(self, leader: int) -> None:
        self.requeued.append(leader)


class Unfinished:
    """A supervisor whose allocation ends before the run does."""

    terminated = False
    reason = ""
    troubled_hosts: ClassVar[dict[str, str]] = {}
    lost_nodes: ClassVar[dict[str, str]] = {}

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    async def run(self) -> int:
        return exits.NEXT_ALLOCATION


@pytest.mark.parametrize(("allowed", "requeued"), [(1, []), (2, [17])])
def test_no_allocation_beyond_the_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    allowed: int,
    requeued: list[int],
) -> None:
    run, slurm = make_run(f"job.max_allocations={allowed}"), FakeSlurm()
    prepare(run, make_site(), RunPaths(tmp_path / "run"), source="x")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr("sys.argv", ["supervisor", "--run-dir", str(tmp_path / "run")])
    monkeypatch.setattr(supervisor, "Slurm", lambda: slurm)
    monkeypatch.setattr(miles_hpc.controller.steps, "SlurmStarter", lambda *args, **kwargs: None)
    monkeypatch.setattr(miles_hpc.controller.supervisor, "Supervisor", Unfinished)
    assert supervisor.main() == exits.NEXT_ALLOCATION
    assert slurm.requeued == requeued
    assert ("was the last of job.max_allocations = 1: to go on" in capsys.readouterr().out) == (allowed == 1)
