"""ARCHITECTURE.md 1 from the source: who may import whom, and where the heavy packages may be imported."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# checkpoints < core < precision < {cluster ...} < {rollout ...} < cli < launchers; recipes hold no code.
RANKS = {
    "checkpoints": 0,
    "core": 1,
    "recipes": 1,
    "precision": 2,
    "cluster": 3,
    "control": 3,
    "dataflow": 3,
    "routing": 3,
    "weights": 3,
    "rollout": 4,
    "trainer": 4,
    "controller": 4,
    "planning": 4,
    "cli": 5,
    "launchers": 6,
}
OURS = {"checkpoints", "miles_hpc", "launchers"}
HEAVY = {"torch", "transformers", "mpi4py", "safetensors", "sglang", "megatron", "ray"}
# Packages whose modules never import HEAVY while they are imported.
TORCH_FREE = {"checkpoints", "core", "cluster", "dataflow", "controller", "planning", "cli", "launchers"}


def modules() -> list[Path]:
    found = [p for top in sorted(OURS) for p in sorted((REPOSITORY / top).rglob("*.py"))]
    assert len(found) > 30
    return found


def package_of(name: str) -> str:
    """The layer of a dotted name; "" for names that are not ours or the bare top package."""
    parts = name.split(".")
    if parts[0] in ("checkpoints", "launchers"):
        return parts[0]
    return parts[1] if parts[0] == "miles_hpc" and len(parts) > 1 else ""


def imported(tree: ast.AST, *, at_import: bool = False) -> list[tuple[int, str]]:
    """(line, dotted name) of every import; with `at_import` only those that run when the module is imported."""
    names: list[tuple[int, str]] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif (at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)) or (
            at_import and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            continue
        else:
            names += imported(node, at_import=at_import)
    return names


def defined_names(tree: ast.Module) -> set[str]:
    """Names that a module binds."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_layers(path: Path) -> None:
    relative = path.relative_to(REPOSITORY)
    own = package_of(".".join(relative.with_suffix("").parts))
    if not own or own == "__init__":
        return
    assert own in RANKS, f"{relative}: package '{own}' has no layer"
    for line, name in imported(ast.parse(path.read_text())):
        other = package_of(name)
        if other in ("", own) or other not in RANKS:
            continue
        allowed = RANKS[other] < RANKS[own]
        assert allowed, f"{relative}:{line} imports {name}: {own} may only import what lies below it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_heavy_packages_stay_out_of_light_layers(path: Path) -> None:
    relative = path.relative_to(REPOSITORY)
    if package_of(".".join(relative.with_suffix("").parts)) not in TORCH_FREE:
        return
    for line, name in imported(ast.parse(path.read_text()), at_import=True):
        assert name.partition(".")[0] not in HEAVY, f"{relative}:{line} imports {name} when it is imported"


def test_tests_and_tools_are_not_imported_by_the_product() -> None:
    for path in modules():
        for line, name in imported(ast.parse(path.read_text())):
            where = f"{path.relative_to(REPOSITORY)}:{line}"
            assert name.partition(".")[0] not in ("tests", "tools"), f"{where} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_all_is_sorted_and_true(path: Path) -> None:
    tree = ast.parse(path.read_text())
    lists = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    if not lists:
        return
    # As ruff sorts: constants, then classes, then the rest.
    kinds = [(0 if n.isupper() else 1 if n[0].isupper() else 2, n) for n in lists[0]]
    assert kinds == sorted(kinds)
    assert set(lists[0]) <= defined_names(tree)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_is_imported_exists(path: Path) -> None:
    """Imports inside functions fail only when they run: look whether the module has the name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in OURS:
            continue
        base = REPOSITORY.joinpath(*(node.module or "").split("."))
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        assert file.is_file(), f"{where}: no module {node.module}"
        defined = defined_names(ast.parse(file.read_text()))
        for alias in node.names:
            submodule = base / alias.name
            there = alias.name in defined or submodule.is_dir() or submodule.with_suffix(".py").is_file()
            assert there, f"{where}: {node.module} has no {alias.name}"


@pytest.mark.parametrize("name", ["miles_hpc.core.load", "miles_hpc.cluster.placement", "miles_hpc.cli.status"])
def test_light_modules_can_be_imported(name: str) -> None:
    importlib.import_module(name)
