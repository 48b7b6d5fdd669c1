"""From one allocation to the next on a real Slurm, when something goes wrong in between.

The supervisor is a small program that does what ours does about the chain (launchers/supervisor.py), without a run.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from miles_hpc.cluster.chain import BadNode, record_bad_nodes
from miles_hpc.cluster.submit import read_follow_up, read_job
from tests.slurm.conftest import until
from tests.slurm.test_submit import Launch
from tools.slurm_box import Box

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(170)]

PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    from miles_hpc.cluster.next_allocation import Chain
    from miles_hpc.cluster.slurm import Slurm
    from miles_hpc.cluster.submit import job_before
    from miles_hpc.control.terms import claim_attempt
    from miles_hpc.core import env, exits
    from miles_hpc.core.load import load_prepared
    from miles_hpc.core.paths import RunPaths

    def say(*words):
        print(*words, flush=True)

    paths, slurm, job = RunPaths(Path(sys.argv[1])), Slurm(), env.read("SLURM_JOB_ID")
    run, site = load_prepared(paths.root)
    if (other := job_before(paths, slurm, job)) is not None:
        say("too many:", job, "beside", other)
        sys.exit(exits.FENCED)
    attempt = claim_attempt(paths)
    chain = Chain(run, site, paths, slurm, job, attempt)
    FIRST
    say("attempt", attempt, "in job", job, chain.begin())
    last = attempt > FIRSTS
    while not last and not (paths.root / "go").exists():
        time.sleep(0.1)
    chain.end(exits.DONE if last else exits.NEXT_ALLOCATION, "", terminated=False)
    chain.next()
"""


class ChainLaunch(Launch):
    """The same with a site where jobs follow each other, or are requeued."""

    def begin(self, *, requeue: bool, first: str = "", firsts: int = 1) -> int:
        site = self.folder / "chained.toml"
        site.write_text(f'name = "chained"\ninherits = "slurm_box"\nrequeue = {str(requeue).lower()}\n')
        return self.submit(PROGRAM.replace("FIRSTS", str(firsts)).replace("FIRST", first), "--site", str(site))

    def go(self) -> None:
        (self.paths.root / "go").touch()

    def said(self, words: str, seconds: float = 90.0) -> None:
        until(lambda: words in self.output(), f"{words!r}: {self.output()}", seconds)

    def empty_queue(self) -> None:
        until(lambda: not self.box.run("squeue", "-h", "-a", "-o", "%i").split(), "an empty queue", 60.0)


@pytest.fixture
def launch(tmp_path: Path, clean_box: Box, monkeypatch: pytest.MonkeyPatch) -> ChainLaunch:
    return ChainLaunch(tmp_path, clean_box, monkeypatch)


@pytest.mark.slow
@pytest.mark.lifecycle
@pytest.mark.parametrize("requeue", [True, False])
def test_slurmctld_is_away_when_it_is_asked(launch: ChainLaunch, requeue: bool) -> None:
    job = launch.begin(requeue=requeue)
    launch.said("attempt 1")
    if not requeue:
        until(lambda: read_follow_up(launch.paths) is not None, "the follow-up", 30.0)
        # Something to ask for: a follow-up that leaves this node out.
        record_bad_nodes(launch.paths, [BadNode(node="rollout9", reason="a test", attempt=1, time=0.0)])
    controller = launch.box.daemons()["slurmctld"]
    assert controller is not None
    os.kill(controller, signal.SIGTERM)  # it saves its state: after SIGKILL it might have forgotten so young a job
    until(lambda: launch.box.daemons()["slurmctld"] is None, "slurmctld's end", 60.0)
    launch.go()
    launch.said("asking again for up to 300 s")
    time.sleep(1.0)
    launch.box.up()
    launch.said("attempt 2")
    assert (read_job(launch.paths) == job) == requeue
    launch.empty_queue()
    assert launch.output().count("attempt") == 2


def test_a_follow_up_that_its_supervisor_didnt_live_to_note(launch: ChainLaunch) -> None:
    """Killed between sbatch and job.json: two jobs wait then, and one of them ends itself."""
    lost = """if attempt == 1:
        slurm.submit(paths.job_script, dependency=f"afterany:{job}")
        os.kill(os.getpid(), signal.SIGKILL)"""
    launch.begin(requeue=False, first=lost, firsts=2)
    launch.said("attempt 2")
    launch.go()
    launch.said("attempt 3")
    launch.empty_queue()
    assert launch.output().count("too many:") == 1
    assert launch.output().count("attempt") == 2  # the first had no time to say so


def test_the_other_nodes_are_too_few(launch: ChainLaunch) -> None:
    launch.begin(requeue=True)
    launch.said("attempt 1")
    record_bad_nodes(launch.paths, [BadNode(node="trainer1", reason="a test", attempt=1, time=0.0)])
    launch.go()
    launch.said("attempt 2")
    assert "handing it in without --exclude" in launch.output()


def test_a_notice_before_the_supervisor_has_a_handler(launch: ChainLaunch) -> None:
    job = launch.begin(requeue=True, first="if attempt == 1:\n        say('deaf')\n        time.sleep(60)")
    launch.said("deaf")
    launch.box.run("scancel", "--signal=USR2", "--batch", str(job))
    launch.said("attempt 2", 30.0)
    launch.empty_queue()
