"""A fake engine with a real prefix cache: a radix tree over token ids of bounded size; the leaf unused longest goes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["RadixEngine"]


class _Node:
    __slots__ = ("children", "parent", "tokens", "used")

    def __init__(self, tokens: tuple[int, ...], parent: _Node | None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = 0


class RadixEngine:
    """Counts what it really finds. With `capacity_tokens` None it forgets nothing."""

    def __init__(self, capacity_tokens: int | None = None) -> None:
        self._capacity = capacity_tokens
        self._root = _Node((), None)
        self._clock = 0
        self.size_tokens = 0

    def request(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Serve a prompt and keep it with its output. Returns how many tokens of the prompt were in the cache."""
        cached = self._walk(prompt, insert=False)
        self._walk((*prompt, *output), insert=True)
        while self._capacity is not None and self.size_tokens > self._capacity:
            self._evict()
        return cached

    def _walk(self, tokens: Sequence[int], *, insert: bool) -> int:
        """The length of the longest known prefix; the whole path counts as used now."""
        self._clock += 1
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            same = 0
            while same < min(len(child.tokens), len(tokens) - at) and child.tokens[same] == tokens[at + same]:
                same += 1
            if same < len(child.tokens):
                child = self._split(child, same)
            child.used = self._clock
            node, at = child, at + same
        if insert and at < len(tokens):
            leaf = _Node(tuple(tokens[at:]), node)
            leaf.used = self._clock
            node.children[leaf.tokens[0]] = leaf
            self.size_tokens += len(leaf.tokens)
        return at

    def _split(self, child: _Node, at: int) -> _Node:
        """Cut an edge in two; returns the upper part."""
        assert child.parent is not None
        upper = _Node(child.tokens[:at], child.parent)
        upper.used = child.used
        child.parent.children[upper.tokens[0]] = upper
        child.tokens, child.parent = child.tokens[at:], upper
        upper.children[child.tokens[0]] = child
        return upper

    def _evict(self) -> None:
        stack, leaves = [self._root], []
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if not node.children and node.parent is not None:
                leaves.append(node)
        leaf = min(leaves, key=lambda n: n.used)
        assert leaf.parent is not None
        del leaf.parent.children[leaf.tokens[0]]
        self.size_tokens -= len(leaf.tokens)
