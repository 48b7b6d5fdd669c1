"""Two submissions of one run at the same moment."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.cluster.submission_lock import sole_submission
from miles_hpc.core.errors import UserError

HERE = socket.gethostname()
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
    ("holder", "free"),
    [
        ({"host": HERE, "pid": GONE, "age_s": 0.0}, True),  # killed
        ({"host": HERE, "pid": os.getppid(), "age_s": 0.0}, False),
        ({"host": "elsewhere", "pid": GONE, "age_s": 0.0}, False),  # nobody can tell from here
        ({"host": "elsewhere", "pid": 1, "age_s": 3600.0}, True),
        ("", False),  # it is being written
        ("{", False),
    ],
)
def test_what_a_killed_one_leaves(tmp_path: Path, holder: dict[str, Any] | str, free: bool) -> None:
    lock = tmp_path / "submitting"
    left = holder
    if isinstance(holder, dict):  # the time is of this moment, however long ago the table was read
        left = json.dumps({"host": holder["host"], "pid": holder["pid"], "time": time.time() - holder["age_s"]})
    lock.write_text(left)
    if free:
        with sole_submission(lock):
            assert json.loads(lock.read_text())["pid"] == os.getpid()
        return
    with pytest.raises(UserError, match="another submission"), sole_submission(lock):
        pass
    assert lock.read_text() == left
