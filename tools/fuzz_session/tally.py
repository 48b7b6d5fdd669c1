"""What a fuzz run went through, counted by template, and as a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tools.fuzz_session.world import World

__all__ = ["Tally", "table"]


@dataclass
class Tally:
    """Sums over the sessions of one template."""

    sessions: int = 0
    turns: int = 0
    split_anew: int = 0
    branches: int = 0
    rollbacks: int = 0
    refused: Counter[int] = field(default_factory=Counter)

    def add(self, world: World) -> None:
        self.sessions += 1
        self.turns += world.notes.turns
        self.split_anew += world.split_anew
        self.branches += world.notes.branches
        self.rollbacks += world.notes.rollbacks
        self.refused.update(world.refused)

    def row(self) -> dict[str, Any]:
        return {
            "sessions": self.sessions,
            "turns": self.turns,
            "not_canonical": round(self.split_anew / self.turns, 3) if self.turns else 0.0,
            "branches": self.branches,
            "rollbacks": self.rollbacks,
            "refused": {str(status): n for status, n in sorted(self.refused.items())},
        }


def table(result: dict[str, Any]) -> Table:
    """For people; the numbers are those of the JSON object."""
    title = f"{result['turns']} turns in {result['sessions']} sessions, seed {result['seed']}, {result['seconds']} s: "
    made = Table(title=f"{title}{result['mismatches']} mismatches")
    statuses = sorted({status for row in result["templates"].values() for status in row["refused"]})
    for column in ("template", "turns", "not canonical", "branches", "rollbacks", *(f"refused {s}" for s in statuses)):
        made.add_column(column, justify="left" if column == "template" else "right")
    for name, row in result["templates"].items():
        refused = [str(row["refused"].get(status, 0)) for status in statuses]
        counts = [str(row[key]) for key in ("branches", "rollbacks")]
        made.add_row(name, str(row["turns"]), f"{row['not_canonical']:.1%}", *counts, *refused)
    return made
