"""The benchmark of sandboxes runs, and says what it promises to say."""

from __future__ import annotations

import json

import pytest

from tools.bench_sandbox import ARMS, OPERATIONS, main


@pytest.mark.slow
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--repeats", "1", "--operations", "8", "--at-once", "1,8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"conditions", "arms", "summary", "not_measured"}
    arms = set(ARMS) - set(result["not_measured"])
    assert "unshare" in arms
    cells = {(row["arm"], row["operation"], row["at_once"]) for row in result["arms"]}
    expected = {(arm, operation, n) for arm in arms for operation in (*OPERATIONS, "command") for n in (1, 8)}
    assert cells == {cell for cell in expected if cell[0] != "bwrap" or cell[1] not in ("first", "later")}
    assert all(row["wall_median_ms"] > 0 and len(row["medians_cpu_ms"]) == 1 for row in result["arms"])
    # Making a sandbox is a process of its own in namespaces of its own, which takes no less than that.
    assert all(row["cpu_median_ms"] > 0.1 for row in result["arms"] if row["operation"] == "episode")
    assert {"sandboxes_per_core_s_unshare_8", "first_over_later_wall_unshare_1"} <= set(result["summary"])


@pytest.mark.parametrize("arguments", [["--arms", "docker"], ["--at-once", "0"], ["--at-once", "x"]])
def test_what_isnt_known_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "expected arms of" in capsys.readouterr().err
