"""One real Slurm for the session: trainer1-2, rollout1-2, sandbox1-2, a partition per group."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from miles_hpc.core.errors import UserError
from tools.slurm_box import Box, BoxSpec


@contextmanager
def fresh_box(spec: BoxSpec) -> Iterator[Box]:
    """A running box in a folder of its own that is gone afterwards.

    Not below pytest's tmp_path: that has mode 0700, and munged refuses a socket in a folder that others can't enter.
    """
    root = Path(tempfile.mkdtemp(prefix="mb-", dir="/tmp"))
    root.chmod(0o755)
    box = Box(root)
    try:
        try:
            box.up(spec)
        except UserError as error:
            if "isn't installed" in str(error):
                pytest.skip(str(error))
            raise
        yield box
    finally:
        box.down()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """The session's box. A test cancels its jobs and starts again the nodes that it ended (`clean_box` does both)."""
    with fresh_box(BoxSpec.parse("trainer:2,rollout:2,sandbox:2")) as running:
        yield running


@pytest.fixture
def clean_box(box: Box) -> Iterator[Box]:
    """The session's box, idle and without jobs before and after the test."""
    settle(box)
    yield box
    settle(box)


def settle(box: Box) -> None:
    """Cancel every job, start what is off, wait until all nodes are idle."""
    box.up()
    jobs = {job.partition("+")[0] for job in box.run("squeue", "-h", "-a", "-o", "%i").split()}
    if jobs:
        box.run("scancel", *sorted(jobs))
    until(lambda: set(box.nodes().values()) == {"idle"}, "all nodes to be idle", 60.0)


def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Poll until `condition` is true; the test fails with `what` otherwise."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)


@cache
def why_not(kind: str) -> str:
    """Why a kind of transport can't be opened here, empty when it can.

    Asked of another process: in this one MPI may have loaded its own UCX already, which says nothing about a job's.
    """
    code = f"""
from miles_hpc.control.opening import open_carrier
from miles_hpc.core.errors import UserError
try:
    open_carrier({kind!r})
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()
