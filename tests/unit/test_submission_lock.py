"""Two submissions of one run at the same moment."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest

from miles_hpc.cluster.submission_lock import sole_submission
from miles_hpc.core.errors import UserError

HERE, NOW = socket.gethostname(), time.time()
GONE = 2**22 + 1  # above the kernel's largest pid


def test_it_is_held_and_let_go(tmp_path: Path) -> None:
    lock = tmp_path / "submitting"
    with pytest.raises(RuntimeError), sole_submission(lock):
        with pytest.raises(UserError, match=rf"process {os.getpid()} on {HERE}.*remove {lock}"), sole_submission(lock):
            pass
        assert lock.exists()  # the refused one leaves it alone
        raise RuntimeError
    assert not lock.exists()


@pytest.mark.parametrize(
    ("left", "free"),
    [
        (json.dumps({"host": HERE, "pid": GONE, "time": NOW}), True),  # killed
        (json.dumps({"host": HERE, "pid": os.getppid(), "time": NOW}), False),
        (json.dumps({"host": "elsewhere", "pid": GONE, "time": NOW}), False),  # nobody can tell from here
        (json.dumps({"host": "elsewhere", "pid": 1, "time": NOW - 3600}), True),
        ("", False),  # it is being written
        ("{", False),
    ],
)
def test_what_a_killed_one_leaves(tmp_path: Path, left: str, free: bool) -> None:
    lock = tmp_path / "submitting"
    lock.write_text(left)
    if free:
        with sole_submission(lock):
            assert json.loads(lock.read_text())["pid"] == os.getpid()
        return
    with pytest.raises(UserError, match="another submission"), sole_submission(lock):
        pass
    assert lock.read_text() == left
