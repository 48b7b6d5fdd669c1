"""Folders of side jobs: who may write there, numbering, records."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miles_hpc.cluster.side_folder import Call, Ended, SideFolder, TaskResult, check_private, create, side_folders
from miles_hpc.cluster.slurm_states import JobState
from miles_hpc.core.errors import IntegrityError, UserError

CALL = Call(name="probe", job_name="tiny-side0001-probe", function="a.b:c", time_limit_s=60.0, signal_s=15)


def test_a_folder_is_private(tmp_path: Path) -> None:
    folder = create(tmp_path / "side_jobs")
    for path in (folder.root, folder.root.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    folder.write(CALL)
    assert (folder.root / "call.json").stat().st_mode & 0o777 == 0o600
    assert folder.call() == CALL
    assert json.loads((folder.root / "call.json").read_text())["function"] == "a.b:c"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o770])
def test_what_others_can_write_is_not_read(tmp_path: Path, mode: int) -> None:
    folder = create(tmp_path / "side_jobs")
    folder.write(CALL)
    folder.root.chmod(mode)
    with pytest.raises(UserError, match="others can write to it"):
        folder.call()
    folder.root.chmod(0o700)
    folder.root.parent.chmod(mode)
    with pytest.raises(UserError, match="others can write to it"):
        side_folders(tmp_path / "side_jobs")
    with pytest.raises(UserError, match="others can write to it"):
        create(tmp_path / "side_jobs")


def test_links_files_and_strangers_are_refused(tmp_path: Path) -> None:
    real = create(tmp_path / "side_jobs").root
    link = tmp_path / "link"
    link.symlink_to(real)
    with pytest.raises(UserError, match="no link"):
        check_private(link)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="expected a folder"):
        check_private(tmp_path / "file")
    with pytest.raises(UserError, match="no such folder"):
        check_private(tmp_path / "none")
    if os.geteuid() == 0:
        os.chown(real, 12345, 12345)
        with pytest.raises(UserError, match="belongs to user id 12345"):
            check_private(real)


def test_each_submission_has_a_number_of_its_own(tmp_path: Path) -> None:
    parent = tmp_path / "side_jobs"
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create(parent), range(40)))
    assert sorted(folder.number for folder in folders) == list(range(1, 41))
    (parent / "notes").mkdir()
    assert [folder.number for folder in side_folders(parent)] == list(range(1, 41))
    folders[0].remove()
    assert create(parent).number == 41
    assert side_folders(tmp_path / "none") == []


def test_records_come_back_or_are_broken(tmp_path: Path) -> None:
    folder = create(tmp_path / "side_jobs")
    with pytest.raises(UserError, match=r"call\.json is missing"):
        folder.call()
    assert (folder.submitted(), folder.ended(), folder.result(0)) == (None, None, None)
    result = TaskResult(task=1, ok=True, value={"a": [1, None]}, host="n1", started=1.0, ended=2.0)
    ended = Ended(state=JobState.NODE_FAIL, reason="why", witness="scontrol", time=3.0)
    folder.write(result)
    folder.write(ended)
    assert (folder.result(0), folder.result(1), folder.ended()) == (None, result, ended)
    with pytest.raises(TypeError):
        folder.write(TaskResult(task=2, ok=True, value=object(), host="n1", started=1.0, ended=2.0))
    assert folder.result(2) is None
    (folder.root / "ended.json").write_text('{"state": "LOST"}')
    with pytest.raises(IntegrityError, match=r"ended\.json"):
        folder.ended()
    assert not folder.cancelled()
    folder.ask_cancel(1.0)
    assert SideFolder(folder.root).cancelled()
