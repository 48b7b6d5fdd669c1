"""The run directory: whose it is, what goes into it, and that nothing is written before everything was checked."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from miles_hpc.cluster.chain import BadNode, is_cancelled, record_bad_nodes, set_cancelled
from miles_hpc.cluster.submit import (
    adopt_job,
    check_idle,
    check_owner,
    config_digest,
    drop_follow_up,
    prepare,
    read_first_attempt,
    read_follow_up,
    read_job,
    submit_follow_up,
    submit_prepared,
)
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site

JOB = "#!/bin/bash\n#SBATCH --job-name=a\n#SBATCH hetjob\n#SBATCH --job-name=b\n"


def prepared(folder: Path, run: RunConfig | None = None) -> RunPaths:
    paths = RunPaths(folder / "run")
    prepare(run or make_run(), make_site(), paths, source="# as written\n", job_text=JOB)
    return paths


def test_what_lies_in_a_prepared_directory(tmp_path: Path) -> None:
    seen = []
    paths = RunPaths(tmp_path / "deep" / "run")
    prepare(
        make_run(),
        make_site(),
        paths,
        source="# as written\n",
        job_text=JOB,
        materialise=lambda run, where: seen.append((run, where)),
    )
    assert seen == [(make_run(), paths)]
    assert paths.run_toml.read_text() == "# as written\n"
    assert paths.job_script.read_text() == JOB
    assert load_prepared(paths.root) == (make_run(), make_site())
    assert stat.S_IMODE(paths.secret.stat().st_mode) == 0o600
    assert len(bytes.fromhex(paths.secret.read_text().strip())) == 32
    identity = json.loads(paths.identity.read_text())
    assert identity["run"] == "tiny"
    assert identity["config_digest"] == config_digest(make_run())
    assert paths.attempts.is_dir()
    assert not [path.name for path in paths.root.iterdir() if path.name.startswith(".")]


def test_preparing_again_keeps_identity_and_secret(tmp_path: Path) -> None:
    paths = prepared(tmp_path)
    kept = (paths.identity.read_bytes(), paths.secret.read_bytes())
    longer = make_run("rollout.n_steps=200")
    assert check_owner(longer, paths)
    prepare(longer, make_site(), paths, source="", job_text="#!/bin/bash\n# next\n")
    assert (paths.identity.read_bytes(), paths.secret.read_bytes()) == kept
    assert load_prepared(paths.root)[0].rollout.n_steps == 200
    assert paths.run_toml.read_text() == "# as written\n"
    assert paths.job_script.read_text() == "#!/bin/bash\n# next\n"


def test_fresh_and_empty_directories_are_nobodys(tmp_path: Path) -> None:
    assert not check_owner(make_run(), RunPaths(tmp_path / "new"))
    assert not check_owner(make_run(), RunPaths(tmp_path))


@pytest.mark.parametrize(
    "override",
    [
        "job.time=00:10:00",
        "rollout.n_steps=500",
        "control.lease_s=30",
        "checkpoint.keep=9",
        "groups.rollout.nodes=1",
        "python.trainer=/p",
        "site=elsewhere",
    ],
)
def test_changes_that_continue_a_run(tmp_path: Path, override: str) -> None:
    assert check_owner(make_run(override), prepared(tmp_path))


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("train.lr=0.1", "(train.lr: 0.0003 there, 0.1 here)"),
        ("seed=9", "(seed: 0 there, 9 here)"),
        ("groups.trainer.nodes=4", "(groups.trainer.nodes: 2 there, 4 here)"),
        ("rollout.rollout_batch_size=4", "(rollout.rollout_batch_size: 16 there, 4 here)"),
        ("environment.options.x=1", "(environment.options: {} there, None here)"),
    ],
)
def test_changes_that_make_another_run(tmp_path: Path, override: str, difference: str) -> None:
    with pytest.raises(UserError) as caught:
        check_owner(make_run(override), prepared(tmp_path))
    assert "belongs to run 'tiny' with another configuration" in str(caught.value)
    assert difference in str(caught.value)


def test_directories_of_others(tmp_path: Path) -> None:
    paths = prepared(tmp_path)
    with pytest.raises(UserError, match=r"belongs to run 'tiny', not 'other'"):
        check_owner(make_run("name=other"), paths)
    paths.identity.write_text("{")
    with pytest.raises(UserError, match=r"can't be read"):
        check_owner(make_run(), paths)
    paths.identity.unlink()
    with pytest.raises(UserError, match=r"is not empty and has no identity"):
        check_owner(make_run(), paths)
    with pytest.raises(UserError, match=r"is a file"):
        check_owner(make_run(), RunPaths(paths.secret))


def test_of_two_submissions_one_gets_the_directory(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    assert not check_owner(make_run("name=late"), paths)  # both looked while nobody was there
    prepared(tmp_path)
    with pytest.raises(UserError, match=r"belongs to run 'tiny'"):
        prepare(make_run("name=late"), make_site(), paths, source="late")
    assert paths.run_toml.read_text() == "# as written\n"


def test_the_job_is_noted_with_those_before_it(tmp_path: Path) -> None:
    slurm, paths = FakeSlurm(), prepared(tmp_path)
    assert read_job(paths) is None
    check_idle(paths, slurm)
    first = submit_prepared(paths, slurm)
    assert slurm.submitted == [JOB]
    assert slurm.state(first) == ["PENDING", "PENDING"]
    with pytest.raises(UserError, match=rf"job {first} of this run is PENDING"):
        check_idle(paths, slurm)
    slurm.finish(first, "TIMEOUT")
    check_idle(paths, slurm)
    second = submit_prepared(paths, slurm)
    assert (read_job(paths), slurm.dependencies) == (second, ["", ""])
    assert json.loads(paths.job.read_text())["previous"] == [first]
    slurm.forget(second)
    check_idle(paths, slurm)


def test_a_follow_up_waits_takes_over_or_is_dropped(tmp_path: Path) -> None:
    slurm, paths = FakeSlurm(), prepared(tmp_path)
    first = submit_prepared(paths, slurm)
    assert read_first_attempt(paths) == 1
    follower = submit_follow_up(paths, slurm, first, exclude=["n3", "n4"])
    assert (slurm.dependencies[-1], slurm.excluded[-1]) == (f"afterany:{first}", ("n3", "n4"))
    assert (read_job(paths), read_follow_up(paths)) == (first, follower)
    slurm.finish(first, "NODE_FAIL")
    with pytest.raises(UserError, match=rf"job {follower} of this run is PENDING"):  # a resume by hand has to wait
        check_idle(paths, slurm)
    adopt_job(paths, first)  # the first job was requeued: it is no follow-up
    assert read_job(paths) == first
    adopt_job(paths, follower)
    assert (read_job(paths), read_follow_up(paths)) == (follower, None)
    assert json.loads(paths.job.read_text())["previous"] == [first]
    assert drop_follow_up(paths, slurm) is None
    third = submit_follow_up(paths, slurm, follower)
    assert drop_follow_up(paths, slurm) == third
    assert (slurm.state(third)[0], read_follow_up(paths)) == ("CANCELLED", None)


def test_a_submission_by_hand_begins_a_new_chain(tmp_path: Path) -> None:
    slurm, paths = FakeSlurm(), prepared(tmp_path)
    slurm.finish(submit_prepared(paths, slurm), "TIMEOUT")
    for attempt in (1, 2):
        paths.attempt(attempt).mkdir()
    set_cancelled(paths, True)
    record_bad_nodes(paths, [BadNode(node="n7", reason="ECC", attempt=2, time=1.0)])
    submit_prepared(paths, slurm)
    assert (read_first_attempt(paths), is_cancelled(paths), slurm.excluded[-1]) == (3, False, ("n7",))


def test_a_job_that_starts_before_sbatch_has_returned(tmp_path: Path) -> None:
    """Its supervisor finds the chain's beginning, isn't told of an old cancel, and its own notes stay."""
    paths = prepared(tmp_path)
    submit_prepared(paths, FakeSlurm())
    paths.attempt(1).mkdir()
    set_cancelled(paths, True)

    class Quick(FakeSlurm):
        def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int:
            job_id = super().submit(script, dependency=dependency, exclude=exclude)
            if not dependency:
                assert (is_cancelled(paths), read_first_attempt(paths)) == (False, 2)
                paths.attempt(2).mkdir()
                adopt_job(paths, job_id)
                submit_follow_up(paths, self, job_id)
            return job_id

    slurm = Quick(_next_id=20)
    second = submit_prepared(paths, slurm)
    assert (read_job(paths), read_follow_up(paths), read_first_attempt(paths)) == (second, 22, 2)
    assert json.loads(paths.job.read_text())["previous"] == [1]


def test_a_resume_that_is_refused_for_its_bad_nodes_says_so(tmp_path: Path) -> None:
    paths = prepared(tmp_path)
    record_bad_nodes(paths, [BadNode(node="n7", reason="ECC", attempt=2, time=1.0)])
    refusing = FakeSlurm(refusal="Requested node configuration is not available")
    with pytest.raises(UserError, match=r"not available \(without n7, which .*bad_nodes\.json lists: take those out"):
        submit_prepared(paths, refusing)


def test_of_two_at_the_same_moment_one_is_refused(tmp_path: Path) -> None:
    """Both have found the run idle; the second comes while sbatch works for the first, or right after it."""
    paths = prepared(tmp_path)
    refused = []

    class Slow(FakeSlurm):
        def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int:
            try:
                submit_prepared(paths, FakeSlurm())
            except UserError as error:
                refused.append(str(error))
            return super().submit(script, dependency=dependency, exclude=exclude)

    slurm = Slow()
    first = submit_prepared(paths, slurm)
    assert len(refused) == 1 and "another submission of this run is at work" in refused[0]
    with pytest.raises(UserError, match=rf"job {first} of this run is PENDING"):
        submit_prepared(paths, slurm)
    assert len(slurm.submitted) == 1


def test_a_refused_resume_leaves_everything_as_it_was(tmp_path: Path) -> None:
    paths = prepared(tmp_path)
    submit_prepared(paths, FakeSlurm())
    set_cancelled(paths, True)
    before = paths.job.read_bytes()
    with pytest.raises(UserError, match="Slurm refused"):
        submit_prepared(paths, FakeSlurm(refusal="no"))
    assert (is_cancelled(paths), json.loads(paths.job.read_bytes())) == (True, json.loads(before))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff"])
def test_a_note_that_cant_be_read_says_the_way_out(tmp_path: Path, text: str) -> None:
    paths = prepared(tmp_path)
    paths.job.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"job\.json: .*mend it, or remove it"):
        read_job(paths)


def test_a_refused_job_is_not_noted(tmp_path: Path) -> None:
    paths = prepared(tmp_path)
    with pytest.raises(UserError, match=r"Slurm refused the job: no"):
        submit_prepared(paths, FakeSlurm(refusal="no"))
    assert read_job(paths) is None


def test_places_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root, message in (
        (tmp_path / "file" / "below" / "run", "/file is a file"),
        (tmp_path / ("n" * 300), "File name too long"),
        (tmp_path / "a\0b", "expected printable characters"),
        (tmp_path / "a\nb", "expected printable characters"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check_owner(make_run(), RunPaths(root))
        assert "\n" not in str(caught.value)
