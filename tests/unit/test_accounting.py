"""sacct's records, as sacct 22.05.8 printed them for het jobs, and the node-hours that follow."""

from __future__ import annotations

from datetime import datetime

import pytest

from miles_hpc.cluster.accounting import OwnUsage, newest_start, parse_sacct, spent

# A het job that was requeued once and is then cancelled, one that failed, one that waits, and a plain job.
PRINTED = """\
2+0|REQUEUED|0:0|3600|1|gb1|2026-11-30T02:12:13|2026-11-30T02:12:22|tiny-trainer
2+1|REQUEUED|0:0|3600|2|gb[2-3]|2026-11-30T02:12:13|2026-11-30T02:12:22|tiny-rollout
4+0|FAILED|10:0|1800|1|gb1|2026-11-30T02:12:14|2026-11-30T02:42:14|tiny-trainer
4+1|FAILED|10:0|1800|2|gb[2-3]|2026-11-30T02:12:14|2026-11-30T02:42:14|a|b
2+0|CANCELLED by 0|0:0|360|1|gb1|2026-11-30T02:12:23|2026-11-30T02:18:23|tiny-trainer
2+1|CANCELLED by 0|0:0|360|2|gb[2-3]|2026-11-30T02:12:23|2026-11-30T02:18:23|tiny-rollout
6+0|PENDING|0:0|0|0|None assigned|Unknown|Unknown|tiny-trainer
8|COMPLETED|0:0|10|1|gb1|2026-11-30T02:13:00|2026-11-30T02:13:10|tiny
"""


def test_records() -> None:
    records = parse_sacct(PRINTED)
    assert [(r.leader, r.offset, r.state) for r in records[:5]] == [
        (2, 0, "REQUEUED"),
        (2, 1, "REQUEUED"),
        (4, 0, "FAILED"),
        (4, 1, "FAILED"),
        (2, 0, "CANCELLED"),
    ]
    assert (records[3].exit_code, records[3].name, records[3].nodes) == ("10:0", "a|b", 2)
    assert (records[6].start, records[6].nodes, records[7].offset) == (None, 0, 0)
    assert (records[6].end, records[6].hosts, records[6].cancelled_by) == (None, "", "")
    assert (records[5].hosts, records[5].cancelled_by) == ("gb[2-3]", "0")
    assert records[5].end == datetime(2026, 11, 30, 2, 18, 23).timestamp()
    assert records[0].start == datetime(2026, 11, 30, 2, 12, 13).timestamp()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "8.batch|COMPLETED|0:0|10|1|h|x|y|batch",
        "8+0.extern|COMPLETED|0:0|10|1|h|x|y|extern",
        "8_[1-3]|PENDING|0:0|0|0|None assigned|Unknown|Unknown|a",
        "8|COMPLETED|0:0|10|1|h|x|y",
        "8||0:0|10|1|h|x|y|a",
        "8|RUNNING|0:0||1|h|x|y|a",
        "8|RUNNING|0:0|10||h|x|y|a",
        "sacct: error: something",
    ],
)
def test_other_lines_are_left_out(line: str) -> None:
    assert parse_sacct(line) == []


def test_the_newest_start_of_each_component() -> None:
    records = parse_sacct(PRINTED)
    assert [(r.offset, r.state) for r in newest_start(records, 2)] == [(0, "CANCELLED"), (1, "CANCELLED")]
    assert newest_start(records, 3) == []


def test_node_hours_by_sacct_count_every_start() -> None:
    found = spent(parse_sacct(PRINTED), [2, 4, 6], [])
    assert found is not None
    assert (found.hours, found.source) == (pytest.approx(3.0 + 0.3 + 1.5), "sacct")


def test_node_hours_by_own_events_where_sacct_has_nothing() -> None:
    own = [OwnUsage(1, 2, 1800.0, 4), OwnUsage(2, 3, 900.0, 4)]
    assert spent([], [2, 3], []) is None
    found = spent([], [2, 3], own)
    assert found is not None and (found.hours, found.source) == (pytest.approx(3.0), "own events")
    found = spent(parse_sacct(PRINTED), [2, 3], own)  # of job 3 accounting knows nothing (yet)
    assert found is not None
    assert (found.hours, found.source) == (pytest.approx(3.3 + 1.0), "sacct; attempt 2 by own events")
