"""A whole run on a host that has IPv6 alone and a name that resolves to 127.0.1.1: control, weights, torch's store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_addresses import DEBIAN_HOSTS, ROOT, veth

SMALL = (
    "groups.trainer.nodes=2",
    "groups.rollout.nodes=1",
    "groups.sandbox.nodes=1",
    "sft.steps=2",
    "sft.n_demonstrations=16",
    "sft.batch_size=8",
    "eval.n_episodes=4",
    "rollout.n_steps=3",
    "rollout.rollout_batch_size=2",
    "rollout.n_samples_per_prompt=4",
    "control.interface=eth*",  # the site says lo: everything is on one machine
)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because agents' sockets lie below it."""
    root = Path(tempfile.mkdtemp(prefix="m6-", dir="/tmp"))
    yield root / "run"
    shutil.rmtree(root, ignore_errors=True)


@pytest.mark.mpi
@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0, reason="namespaces need root")
def test_a_whole_run_over_ipv6(run_dir: Path) -> None:
    command = [sys.executable, "-P", "-m", "miles_hpc.cli.main", "local", "demo", "--run-dir", str(run_dir)]
    for setting in SMALL:
        command += ["--set", setting]
    script = (
        f"set -e\nip link set lo up\nhostname trap\n{DEBIAN_HOSTS}\n{veth('eth0', 'addr add fd00:9::1/64 dev eth0')}\n"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "bash", "-c", script + 'exec "$0" "$@"', *command],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    logs = "\n".join(f"{p.name}: {p.read_text()[-800:]}" for p in sorted(run_dir.glob("attempts/*/logs/*.log")))
    assert (done.returncode, "the run is complete" in done.stdout) == (0, True), done.stdout + done.stderr + logs
    published = [json.loads(p.read_text()) for p in run_dir.glob("terms/*/rendezvous/*.json")]
    assert {p["name"] for p in published} == {"controller", "sandbox-sandbox1"}
    assert all(address.startswith("tcp://[fd00:9::1]:") for p in published for address in p["addresses"])
