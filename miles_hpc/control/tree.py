"""The tree along which a command travels: planned level by level, each process its own branches. Pure.

root ─┬─ head of branch 1 ─┬─ head of branch 1.1 ─ ...
      │                    └─ head of branch 1.2 ─ ...
      └─ head of branch 2 ─ ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from miles_hpc.core.errors import UserError

__all__ = ["Branch", "Node", "plan_branches", "plan_tree"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Branch(Generic[T]):
    """A target that is sent to, and those that it passes the command on to."""

    head: T
    rest: tuple[T, ...]


@dataclass(frozen=True, slots=True)
class Node(Generic[T]):
    """A target with the targets that it sends to."""

    target: T
    children: tuple[Node[T], ...]


def plan_branches(targets: Sequence[T], arity: int) -> list[Branch[T]]:
    """At most `arity` branches, whose sizes differ by at most one; neighbours stay together. Raises UserError."""
    if arity < 2:
        raise UserError(f"fan-out: arity {arity}: expected at least 2")
    n_branches = min(arity, len(targets))
    branches = []
    start = 0
    for n in range(n_branches):
        end = start + (len(targets) - start + n_branches - n - 1) // (n_branches - n)
        branches.append(Branch(targets[start], tuple(targets[start + 1 : end])))
        start = end
    return branches


def plan_tree(targets: Sequence[T], arity: int) -> tuple[Node[T], ...]:
    """The whole tree as it comes about when every process plans its own branches: what the root sends to.

    Its depth is at most ceil(log_arity(N)) + 1.
    """
    return tuple(Node(branch.head, plan_tree(branch.rest, arity)) for branch in plan_branches(targets, arity))
