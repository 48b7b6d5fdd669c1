"""The benchmark of the session core runs, and says what it promises to say."""

from __future__ import annotations

import json

import pytest

from tools.bench_session import main


def test_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--repeats", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"conditions", "arms", "summary"}
    assert {"turns_per_s", "turn_cost_ratio_64k_over_1k"} <= set(result["summary"])
    assert all(value > 0 for value in result["summary"].values())
    tokens = {arm["size"]: arm["history_tokens"] for arm in result["arms"]}
    assert tokens["1k"] < 1_300 and 64_000 <= tokens["64k"] < 64_300
    assert {arm["history"] for arm in result["arms"]} == {"linear", "tree"}
    assert all(len(arm["medians_cpu_us"]) == 1 for arm in result["arms"])
