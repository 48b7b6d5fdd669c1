"""The prefix cache of one engine: a radix tree of bounded size, as SGLang's RadixAttention keeps it.

    root ── system prompt ─┬─ task ─┬─ turn ── turn        each edge is a piece of tokens, each node a prefix
                           │        ╰─ turn
                           ╰─ task ── ...                  full: the leaf that was used longest ago goes, but no prefix
                                                           of a request that runs

Pieces stand for their tokens: two of different names differ in the first one, so that no edge is ever cut in two. What
a request finds is the same as in a tree over tokens (tests/unit/test_bench_session_trace.py compares the two).
Source of the rules: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs, 2024, section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tools.bench_session.trace import Piece

__all__ = ["Lease", "PrefixCache"]


class _Node:
    __slots__ = ("children", "leases", "parent", "piece", "used")

    def __init__(self, piece: Piece, parent: _Node | None) -> None:
        self.piece = piece
        self.parent = parent
        self.children: dict[str, _Node] = {}
        self.used = 0
        self.leases = 0  # requests that run on it or on what follows


class Lease:
    """A running request's prefix: it stays until `PrefixCache.end`."""

    def __init__(self, node: _Node, cached_tokens: int) -> None:
        self.node = node
        self.cached_tokens = cached_tokens


class PrefixCache:
    """`capacity_tokens` None: nothing is ever forgotten."""

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self._capacity = capacity_tokens
        self._root = _Node(Piece("", 0), None)
        self._clock = 0
        self._leaves: list[tuple[int, int, _Node]] = []  # (used, tie, node); stale entries are passed over
        self._ties = 0
        self.size_tokens = 0
        self.evicted_tokens = 0

    def begin(self, prompt: Sequence[Piece]) -> Lease:
        """A request with this prompt starts: the prompt is in the cache from now on."""
        self._clock += 1
        node, cached, found = self._root, 0, True
        for piece in prompt:
            child = node.children.get(piece.name)
            if child is None:
                found = False
                child = self._add(piece, node)
            elif found:
                cached += piece.n_tokens
            child.used = self._clock
            node = child
        lease = Lease(node, cached)
        self._hold(node, 1)
        self._shrink()
        return lease

    def end(self, lease: Lease, output: Piece) -> None:
        """The request ended: its output is kept behind its prompt."""
        self._clock += 1
        self._hold(lease.node, -1)
        leaf = lease.node.children.get(output.name) or self._add(output, lease.node)
        node: _Node | None = leaf
        while node is not None:
            node.used = self._clock
            node = node.parent
        self._offer(leaf)
        self._shrink()

    # ------------------------------------------------------------------------------------------- inside

    def _add(self, piece: Piece, parent: _Node) -> _Node:
        node = _Node(piece, parent)
        parent.children[piece.name] = node
        self.size_tokens += piece.n_tokens
        return node

    def _hold(self, node: _Node | None, more: int) -> None:
        leaf = node
        while node is not None:
            node.leases += more
            node = node.parent
        if more < 0 and leaf is not None:
            self._offer(leaf)

    def _offer(self, node: _Node) -> None:
        """A candidate for eviction, if it is one when its turn comes."""
        self._ties += 1
        heapq.heappush(self._leaves, (node.used, self._ties, node))

    def _shrink(self) -> None:
        while self._capacity is not None and self.size_tokens > self._capacity and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.children or node.leases or parent.children.get(node.piece.name) is not node:
                continue
            if node.used != used:
                self._offer(node)
                continue
            del parent.children[node.piece.name]
            self.size_tokens -= node.piece.n_tokens
            self.evicted_tokens += node.piece.n_tokens
            if not parent.children:
                self._offer(parent)
