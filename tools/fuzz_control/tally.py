"""What a stage did and what it found: passed around, added up, printed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Tally"]

_MAX_TEXTS = 20


@dataclass
class Tally:
    """Counts of one stage. A violation is a broken promise of the control layer."""

    stage: str
    where: str  # listening endpoint, or in process
    frames: int = 0  # mutated or made up; valid ones that only lead there aren't counted
    connections: int = 0
    duration_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    n_violations: int = 0

    def violated(self, text: str) -> None:
        """Note one; only the first few texts are kept."""
        self.n_violations += 1
        if len(self.violations) < _MAX_TEXTS:
            self.violations.append(f"{self.stage}, {self.where}: {text}")
