"""Whether a side job's call can work, looked at before anything is written or submitted.

    module ──find──▶ its source ──parse──▶ the function's parameters ──compare──▶ UserError, or silence

The source is read and never run: a module of ours may need torch, and the user's own may need whatever the nodes have.

| looked at here | left to the node |
|---|---|
| whether the module is there, and binds the name | modules without source; names that `import *` may bind |
| argument names against a plain `def` | functions with decorators, classes, names from elsewhere |
| of our own functions: kinds of values, `run_dir`, `folder`, `module`, the checkpoint of `step` | other values |
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal

import msgspec

from miles_hpc.cluster.side_plan import OUR_PACKAGES
from miles_hpc.cluster.side_tasks import find_checkpoint
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths

__all__ = ["check_binding", "check_call"]

#: Annotations that are made of these names are compared with the value.
_KINDS = {"bool": bool, "dict": dict, "float": float, "int": int, "list": list, "str": str}


@dataclass(frozen=True)
class _Parameters:
    """What a call by name may and must hold. `kinds` are the types of annotations as far as they are plain."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    more: bool  # **arguments takes all names
    kinds: Mapping[str, Any]


def check_call(python_path: Iterable[str], what: str, function: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserError when the call of `function` ("module:attribute") can't work; reads only. `what` begins its text.

    Modules are looked for in this project's packages and in the folders `python_path`: see the module's table for what
    is seen here and what the node alone can tell.
    """
    module, _, attribute = function.partition(":")
    ours = module.partition(".")[0] in OUR_PACKAGES
    spec = _find_module(module, None if ours else [str(folder) for folder in python_path])
    if spec is None:
        raise UserError(
            f"{what}: function '{function}': no module {module}: expected one of {' or '.join(OUR_PACKAGES)}, "
            "or of a folder in the run's python_path"
        )
    tree = _source(spec)
    if tree is None:
        return
    _check_name(tree, what, function, attribute)
    parameters = _parameters(tree, attribute)
    if parameters is None:
        return
    _check_names(parameters, what, function, arguments)
    if ours:
        _check_values(parameters, what, arguments)


def check_binding(python_path: Iterable[str], what: str, function: str) -> bool:
    """Whether the module of `function` ("module:attribute") is here or in `python_path`; reads only.

    Raises UserError when it is, and has no such attribute.
    """
    module, _, attribute = function.partition(":")
    spec = _find_module(module, [str(folder) for folder in python_path]) or _find_module(module, None)
    tree = None if spec is None else _source(spec)
    if tree is not None:
        _check_name(tree, what, function, attribute)
    return spec is not None


def _find_module(module: str, folders: list[str] | None) -> ModuleSpec | None:
    """The module's spec without importing its parents; None when there is none. `folders` None: where Python looks."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if folders is None else PathFinder.find_spec(top, folders)
    except (ImportError, ValueError):
        return None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _source(spec: ModuleSpec) -> ast.Module | None:
    """The parsed source; None where there is none that can be read here."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (OSError, SyntaxError, ValueError):
        return None  # the node may be able to read it, and its Python may be newer


def _check_name(tree: ast.Module, what: str, function: str, attribute: str) -> None:
    bound = set(_bound(tree))
    if attribute in bound or bound & {"*", "__getattr__"}:
        return
    near = get_close_matches(attribute, bound, 1)
    hint = f"did you mean '{near[0]}'?" if near else "expected a function of that module"
    raise UserError(f"{what}: function '{function}': the module has no '{attribute}': {hint}")


def _bound(tree: ast.Module) -> Iterator[str]:
    """Every name that the source binds anywhere: more than the module has, never less; "*" for `import *`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "exec"):
            yield "*"


def _parameters(tree: ast.Module, attribute: str) -> _Parameters | None:
    """Of a plain function that the module's own level defines once; None for anything else."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == attribute]
    if len(found) != 1 or found[0].decorator_list or list(_bound(tree)).count(attribute) != 1:
        return None
    spec = found[0].args
    plain = [*spec.args, *spec.kwonlyargs]
    defaults = len(spec.defaults)
    required = [*spec.posonlyargs, *spec.args][: len(spec.posonlyargs) + len(spec.args) - defaults]
    required += [one for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None]
    kinds = {one.arg: kind for one in plain if (kind := _kind(one.annotation)) is not None}
    return _Parameters(
        names=tuple(one.arg for one in plain),
        required=tuple(one.arg for one in required),
        more=spec.kwarg is not None,
        kinds=kinds,
    )


def _kind(annotation: ast.expr | None) -> Any:
    """The type that an annotation names; None for one that isn't made of `_KINDS`."""
    match annotation:
        case ast.Name(id=name):
            return _KINDS.get(name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            kind = _kind(left)
            return None if kind is None else kind | None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=options)):
            return Literal[tuple(option.value for option in options if isinstance(option, ast.Constant))]
        case ast.Subscript(value=ast.Name(id="list"), slice=inner):
            kind = _kind(inner)
            return None if kind is None else GenericAlias(list, (kind,))
    return None


def _check_names(parameters: _Parameters, what: str, function: str, arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name in parameters.names or parameters.more:
            continue
        near = get_close_matches(name, parameters.names, 1)
        known = ", ".join(parameters.names) or "none"
        hint = f"did you mean '{near[0]}'?" if near else f"expected some of {known}"
        raise UserError(f"{what}: argument '{name}': {function} has none of this name: {hint}")
    missing = [name for name in parameters.required if name not in arguments]
    if missing:
        raise UserError(f"{what}: {function} needs {', '.join(missing)}: give --arg {missing[0]}=VALUE")


def _check_values(parameters: _Parameters, what: str, arguments: Mapping[str, Any]) -> None:
    """What our own functions would refuse on the node; each of these names means the same in all of them."""
    for name, value in arguments.items():
        if name not in parameters.kinds:
            continue
        try:
            msgspec.convert(value, parameters.kinds[name])
        except msgspec.ValidationError as error:
            raise UserError(f"{what}: argument {name} = {value!r}: {error}") from error
    for name in ("run_dir", "folder"):
        if name in arguments and not Path(str(arguments[name])).is_dir():
            raise UserError(f"{what}: argument {name} = '{arguments[name]}': no such directory")
    if (output := arguments.get("output")) and not Path(str(output)).is_absolute():
        raise UserError(f"{what}: argument output = '{output}': expected an absolute path")
    if {"run_dir", "step"} <= set(parameters.names) and "run_dir" in arguments:
        try:
            find_checkpoint(RunPaths(Path(arguments["run_dir"])).checkpoints, arguments.get("step"))
        except UserError as error:
            raise UserError(f"{what}: {error}") from error
    program = arguments.get("module")
    if isinstance(program, str) and program.partition(".")[0] in OUR_PACKAGES and _find_module(program, None) is None:
        raise UserError(f"{what}: argument module = '{program}': there is no such module")
