"""The fuzzer itself, at a size that fits the suite."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from miles_hpc.core.messages import decode
from tools.fuzz_control.mutate import broken_header, changed, odd_but_valid_header

ROOT = Path(__file__).parents[2]
HAS_UCX = any(map(importlib.util.find_spec, ("ucxx", "ucp")))


def test_changes_never_leave_the_whole() -> None:
    rng = Random(1)
    for _ in range(5000):
        data = rng.randbytes(rng.randrange(1, 60))
        assert not changed(rng, data).startswith(data)


def test_broken_headers_are_broken_and_odd_ones_are_not() -> None:
    rng = Random(2)
    for _ in range(2000):
        decode(odd_but_valid_header(rng))
        with pytest.raises((ValueError, RecursionError)):  # msgspec's errors are ValueErrors
            decode(broken_header(rng))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    ["tcp", pytest.param("ucx", marks=pytest.mark.skipif(not HAS_UCX, reason="neither ucxx nor ucx-py is here"))],
)
def test_twenty_thousand_frames_break_no_promise(kind: str) -> None:
    command = [sys.executable, "-m", "tools.fuzz_control", "--frames", "20000", "--kinds", kind, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["violations"] == []
    assert done.returncode == 0
    against = [stage["frames"] for stage in found["stages"] if stage["where"] != "in process"]
    assert sum(against) >= 20_000
    for target in found["targets"]:
        assert target["good_calls"] > 10
        assert target["after"]["handled"]["honest:honest"] > 100
        assert target["after"]["handled"]["broken:other"] > 1000
