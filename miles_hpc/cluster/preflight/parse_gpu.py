"""What nvidia-smi prints with --format=csv,noheader,nounits, as data. Pure.

A field that a GPU or driver hasn't got reads "[N/A]", "N/A" or "[Not Supported]": None here, which is no fault.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPU_QUERY", "REMAPPED_QUERY", "GpuState", "gpu_states", "remapped_pending"]

GPU_QUERY = "index,uuid,ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,memory.used"
REMAPPED_QUERY = "gpu_uuid,remapped_rows.pending,remapped_rows.failure"
_MIB = 1024**2


@dataclass(frozen=True)
class GpuState:
    """One GPU. Error counts are None where ECC is off or unknown to the driver."""

    index: int
    uuid: str
    volatile_errors: int | None  # uncorrected, since the driver was loaded: a fault now
    aggregate_errors: int | None  # over the GPU's life: history
    used_bytes: int | None


def gpu_states(text: str) -> list[GpuState]:
    """The answer to GPU_QUERY, a line per GPU. Raises ValueError for a line of another shape."""
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_QUERY.split(",")) or not cells[0].isdecimal():
            raise ValueError(line.strip())
        used = _number(cells[4])
        found.append(
            GpuState(
                index=int(cells[0]),
                uuid=cells[1],
                volatile_errors=_number(cells[2]),
                aggregate_errors=_number(cells[3]),
                used_bytes=None if used is None else used * _MIB,
            )
        )
    return found


def remapped_pending(text: str) -> dict[str, str]:
    """UUIDs of GPUs with a row that waits for a reset ("pending") or couldn't be remapped ("failure")."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            if _yes(cells[2]):
                found[cells[0]] = "failure"
            elif _yes(cells[1]):
                found[cells[0]] = "pending"
    return found


def _yes(cell: str) -> bool:
    return cell.lower() in ("yes", "1")


def _number(cell: str) -> int | None:
    return int(cell) if cell.isdecimal() else None
