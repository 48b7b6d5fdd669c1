"""How processes wait: by means that have no limit of their own."""

from __future__ import annotations

import ast

from tests.architecture.test_imports import REPOSITORY, modules


def test_nobody_waits_by_select() -> None:
    """select(2) can't watch a descriptor above 1023, and a controller of many peers has such: poll(2) or epoll(7)."""
    places = [*modules(), *sorted((REPOSITORY / "tools").rglob("*.py"))]
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in places
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("select.select", "selectors.SelectSelector")
    ]
    assert not found, f"select.select in {', '.join(found)}"
