"""Verification notices any change to a file whose CRC was recorded."""

from pathlib import Path

from checkpoints.journal import GroupOwned
from checkpoints.manifest import Counters, JournalPosition, LineageSegment, Manifest
from checkpoints.verify import crc32_of_file, file_entry, verify_checkpoint, verify_payload, verify_payloads


def test_checkpoint_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)  # several blocks
    (tmp_path / "b").write_bytes(b"123456789")
    assert crc32_of_file(tmp_path / "b") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    manifest = Manifest(
        run="r",
        term=1,
        step=1,
        attempt=1,
        lineage=(LineageSegment(term=1, first_step=1, last_step=1),),
        counters=Counters(next_group_id=0),
        journal=JournalPosition(term=1, offset=0),
        files={"a": file_entry(tmp_path / "a", digest=True), "b": file_entry(tmp_path / "b")},
    )
    assert verify_checkpoint(tmp_path, manifest) == ()
    (tmp_path / "b").write_bytes(b"987654321")  # no CRC recorded: not seen
    assert verify_checkpoint(tmp_path, manifest) == ()
    (tmp_path / "a").write_bytes(b"x" * 2_999_999 + b"y")
    assert verify_checkpoint(tmp_path, manifest)[0].startswith("a: CRC-32 ")
    (tmp_path / "a").write_bytes(b"x")
    assert verify_checkpoint(tmp_path, manifest) == ("a: 1 bytes, expected 3000000",)


def test_payloads(tmp_path: Path) -> None:
    def record(group_id: int, path: str, crc32: int = 0xCBF43926) -> GroupOwned:
        return GroupOwned(
            group_id=group_id,
            attempt=0,
            path=path,
            n_bytes=9,
            crc32=crc32,
            oldest=None,
            newest=None,
            rewards=(),
            n_tokens=0,
        )

    (tmp_path / "good").write_bytes(b"123456789")
    (tmp_path / "short").write_bytes(b"12345678")
    (tmp_path / "folder").mkdir()
    assert verify_payload(tmp_path, record(1, "good")) is None
    problems = verify_payloads(
        tmp_path, [record(1, "good"), record(2, "good", 7), record(3, "short"), record(4, "gone")]
    )
    assert [p.split(": ", 2)[2] for p in problems] == [
        "CRC-32 cbf43926, expected 00000007",
        "8 bytes, expected 9",
        "missing",
    ]
    assert problems[0].startswith("group 2 attempt 0: payload good")
