"""How findings word sizes, and which nodes are alike. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["bytes_text", "count_text", "listed", "nodes_by_value"]

_Value = TypeVar("_Value", bound=Hashable)


def bytes_text(value: float) -> str:
    """Decimal units, as file systems' documents have them: "0 B", "1.5 GB", "32 TB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} PB"


def count_text(value: int) -> str:
    """With separators: 1,000,000."""
    return f"{value:,}"


def listed(names: Iterable[str], most: int = 6) -> str:
    """Names with commas, the rest as a number: "n1, n2 and 30 more"; "none" for no name."""
    every = list(names)
    shown = ", ".join(every[:most])
    return f"{shown} and {len(every) - most} more" if len(every) > most else shown or "none"


def nodes_by_value(values: Mapping[str, _Value]) -> dict[_Value, list[str]]:
    """Nodes, sorted, by the value that they have in common; of several values the one that came first is first."""
    found: dict[_Value, list[str]] = {}
    for node, value in values.items():
        found.setdefault(value, []).append(node)
    return {value: sorted(nodes) for value, nodes in found.items()}
