"""Compare the trainer's state in two checkpoints, bit by bit: `python -m tools.checkpoint_diff A B [--json]`.

A and B are checkpoint folders, or run directories (their newest complete checkpoint). Weights, optimizer moments and
counters are all compared. Exit code: 0 equal, 1 different, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpoints.manifest import newest_complete
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["Difference", "diff", "find_checkpoint"]


@dataclass(frozen=True)
class Difference:
    """What two states have in common; `largest` is the largest absolute difference of any element."""

    tensors: int
    elements: int
    missing: tuple[str, ...]  # in one of the two only
    different: tuple[str, ...]  # other shape, type or bits
    largest: float

    @property
    def equal(self) -> bool:
        return not self.missing and not self.different


def find_checkpoint(path: Path) -> Path:
    """The folder itself, or the newest complete checkpoint of a run directory. Raises UserError."""
    if (path / "COMPLETE").is_file():
        return path
    newest = newest_complete(RunPaths(path).checkpoints)
    if newest is None:
        raise UserError(f"{path}: neither a complete checkpoint nor a run directory with one")
    return newest[0]


def load(folder: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, by name."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in stored.items()
        if isinstance(meta, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def diff(first: Path, second: Path) -> Difference:
    """Compare two checkpoint folders."""
    a, b = load(first), load(second)
    different, largest, elements = [], 0.0, 0
    for name in sorted(a.keys() & b.keys()):
        one, two = a[name], b[name]
        elements += one.numel()
        if one.dtype != two.dtype or one.shape != two.shape:
            different.append(name)
        elif one.numpy().tobytes() != two.numpy().tobytes():
            different.append(name)
            largest = max(largest, float((one.double() - two.double()).abs().max()))
    return Difference(len(a), elements, tuple(sorted(a.keys() ^ b.keys())), tuple(different), largest)


def main() -> int:
    parser = argparse.ArgumentParser(prog="checkpoint_diff", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        folders = find_checkpoint(args.first), find_checkpoint(args.second)
    except UserError as error:
        print(f"checkpoint_diff: error: {error}", file=sys.stderr)
        return 2
    found = diff(*folders)
    if args.json:
        print(json.dumps(asdict(found) | {"equal": found.equal, "folders": [str(one) for one in folders]}))
    else:
        print(f"{folders[0]}\n{folders[1]}")
        told = "equal, bit by bit" if found.equal else f"{len(found.different)} differ, {len(found.missing)} missing"
        print(f"{found.tensors} tensors, {found.elements} elements: {told}; largest difference {found.largest:.3g}")
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())
