"""A whole run over UCX on the real box, shot at: every group is trained once, and nothing is lost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import why_not
from tests.slurm.test_run import N_STEPS, SMALL
from tools.kill_test import kill_test
from tools.slurm_box import Box


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets and Slurm's output lie below it."""
    root = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    root.chmod(0o755)
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_over_ucx_survives_kills(clean_box: Box, run_dir: Path) -> None:
    if reason := why_not("ucx"):
        pytest.skip(reason)
    faults = ["agent", "rank", "controller"]
    result = kill_test(clean_box, run_dir, faults, seed=1, settings=(*SMALL, "control.transport=ucx"))
    events = (run_dir.with_suffix(".watch.log")).read_text()[-3000:]
    assert (result["faults"], result["exit"], result["audit_exit"]) == (faults, 0, 0), (result, events)
    assert (result["lost"], result["twice"], result["conflicts"]) == ([], [], []), result
    assert result["trained"] == result["asked"] == N_STEPS * 4
