"""Nodes that a box's Slurm only knows of: no daemon runs on them, and jobs for them are asked about, never started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Declared"]


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Nodes name1, name2, ... whose partitions and features are a real cluster's.

    `sbatch --test-only` parses that cluster's scripts as it would there.
    """

    name: str
    nodes: int
    partitions: tuple[str, ...]
    cpus: int
    features: tuple[str, ...] = ()
    gpus: int = 0
    gpu_type: str = ""  # as in gres requests: gpu:<type>:<n>

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Declared:
        """Inverse of dataclasses.asdict. Raises TypeError or KeyError when `data` has another shape."""
        return cls(**{**data, "partitions": tuple(data["partitions"]), "features": tuple(data["features"])})

    def conf_lines(self, *, memory_mib: int) -> list[str]:
        """Lines of slurm.conf. Cloud nodes: Slurm takes them for powered off and never waits for them."""
        hosts = f"{self.name}1" if self.nodes == 1 else f"{self.name}[1-{self.nodes}]"
        gres = f" Gres=gpu:{self.gpu_type + ':' if self.gpu_type else ''}{self.gpus}" if self.gpus else ""
        feature = f" Feature={','.join(self.features)}" if self.features else ""
        return [
            f"NodeName={hosts} CPUs={self.cpus} RealMemory={memory_mib}{gres}{feature} State=CLOUD",
            *(f"PartitionName={name} Nodes={hosts} MaxTime=INFINITE State=UP" for name in self.partitions),
        ]
