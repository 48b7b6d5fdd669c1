"""Run and site files: TOML to frozen structs, with errors that name the key, the value and the way out.

    text --tomllib--> tables --overrides (--set)--> tables --unknown keys refused--> msgspec.convert --> struct

Nothing here imports what a name stands for; cross-field rules are in `core.validate`.
"""

from __future__ import annotations

import datetime
import re
import tomllib
import types
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from miles_hpc.core import toml
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site_rules import site_complaints
from miles_hpc.core.validate import validate

__all__ = [
    "apply_overrides",
    "load_prepared",
    "load_run",
    "load_site",
    "parse",
    "resolved_toml",
    "site_names",
    "validate",
    "with_absolute_paths",
]

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]+)`")


def load_run(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """A run file with `--set` overrides applied. Raises UserError; rules across fields are `validate`'s."""
    data = _read_toml(path)
    apply_overrides(data, RunConfig, overrides)
    return parse(data, RunConfig, path.name)


def site_names(search: Iterable[Path]) -> dict[str, Path]:
    """Site files by name; a folder earlier in `search` wins."""
    found: dict[str, Path] = {}
    for folder in search:
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def load_site(name: str, search: list[Path]) -> SiteConfig:
    """The site file `name`.toml of the first folder that has it, merged with what it inherits from.

    `name` may also be an alias that a file lists, or a path to a TOML file. Raises UserError.
    """
    if not name:
        raise UserError("no site chosen: give --site, set MILES_HPC_SITE, or put 'site' into the run file")
    if name.endswith(".toml"):
        path = Path(name)
        return _site(path, path.name, search)
    known = site_names(search)
    if name not in known:
        name = _site_with_alias(name, known) or name
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f": did you mean '{near[0]}'?" if near else f": expected one of {', '.join(sorted(known)) or 'none'}"
        raise UserError(f"no site named '{name}' in {', '.join(str(folder) for folder in search)}{hint}")
    site = _site(known[name], known[name].name, search)
    if site.name != name:
        raise UserError(f'{known[name]}: name = "{site.name}", expected "{name}" as the file is called')
    return site


def _site(path: Path, source: str, search: list[Path]) -> SiteConfig:
    site = parse(merged_tables(path, search), SiteConfig, source)
    for complaint in site_complaints(site):
        raise UserError(f"{source}: {complaint}")
    return site


def _site_with_alias(alias: str, known: dict[str, Path]) -> str:
    """The name of the site that lists `alias`, "" when none does; broken files are somebody else's error."""
    for name, path in known.items():
        try:
            aliases = _read_toml(path).get("aliases", [])
        except UserError:
            continue
        if isinstance(aliases, list) and alias in aliases:
            return name
    return ""


def load_prepared(run_dir: Path) -> tuple[RunConfig, SiteConfig]:
    """The resolved run and site of a run directory, as submit wrote them. Raises UserError when it isn't one."""
    paths = RunPaths(run_dir)
    for path in (paths.resolved_toml, paths.site_toml):
        if not path.is_file():
            raise UserError(f"{run_dir} is not a run directory: {path.name} is missing; 'miles-hpc submit' makes one")
    run = parse(_read_toml(paths.resolved_toml), RunConfig, str(paths.resolved_toml))
    return run, parse(_read_toml(paths.site_toml), SiteConfig, str(paths.site_toml))


def resolved_toml(config: RunConfig | SiteConfig) -> str:
    """Every field with its value as TOML; loads back equal to `config`."""
    return toml.dumps(config)


def with_absolute_paths(run: RunConfig, base: Path) -> RunConfig:
    """Relative folders of a run file made absolute from `base`: roles start in other working directories."""

    def absolute(text: str) -> str:
        return str(base / Path(text).expanduser()) if text else ""

    replace = msgspec.structs.replace
    model = run.model
    tokenizer = model.tokenizer if model.tokenizer in ("", "characters") else absolute(model.tokenizer)
    python = {
        name: absolute(text) if "/" in text else text for name, text in msgspec.structs.asdict(run.python).items()
    }
    return replace(
        run,
        run_dir=absolute(run.run_dir),
        python_path=[absolute(text) for text in run.python_path],
        model=replace(model, path=absolute(model.path), tokenizer=tokenizer),
        python=replace(run.python, **python),
    )


# ------------------------------------------------------------------------------------------------ inheritance

#: What a site file says about itself alone; a base's sources are kept behind the file's own.
_OWN = ("name", "title", "aliases", "host_patterns", "host_variables", "verified")


def merged_tables(path: Path, search: list[Path]) -> dict[str, Any]:
    """A site file's tables over those of its base, and that one's. Tables merge key by key, lists replace whole.

    Bases are searched by name, as sites are. Raises UserError for a base that isn't there, isn't valid or comes twice.
    """
    data = _read_toml(path)
    chain = [path]
    known = site_names(search)
    while "inherits" in data:
        base = data.pop("inherits")
        if base == "":
            break
        if not isinstance(base, str):
            raise UserError(f"{path.name}: 'inherits' = {_show(base)}: expected str, seen {type(base).__name__}")
        if base not in known:
            near = get_close_matches(base, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected one of {', '.join(sorted(known)) or 'none'}"
            raise UserError(f'{chain[-1].name}: inherits = "{base}": no site of that name: {hint}')
        if any(known[base].resolve() == seen.resolve() for seen in chain):
            names = " -> ".join([*(seen.stem for seen in chain), base])
            raise UserError(f'{chain[-1].name}: inherits = "{base}": a circle, {names}: take one of them out')
        below = _read_toml(known[base])
        chain.append(known[base])
        # Each file is checked by itself: an error names the file that it stands in.
        parse(below, SiteConfig, known[base].name)
        parse({**data, "name": data.get("name", "")}, SiteConfig, chain[-2].name)
        data = _over(data, below)
    return data


def _over(data: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    merged = _merge({key: value for key, value in below.items() if key not in _OWN}, data)
    sources = [*data.get("sources", []), *below.get("sources", [])]
    return {**merged, "sources": sources} if sources else merged


def _merge(below: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in data.items():
        both_tables = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merge(below[key], value) if both_tables else value
    return merged


# ------------------------------------------------------------------------------------------------ overrides


def apply_overrides(data: dict[str, Any], struct: type[msgspec.Struct], overrides: Iterable[str]) -> None:
    """Apply `a.b=c` to `data` in place. The value is TOML; what isn't TOML is a string.

    Tables on the way are made; the key itself is checked by `parse` with all others.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise UserError(f"--set {override}: expected key=value, for example rollout.n_steps=20")
        table = data
        for i, part in enumerate(parts[:-1]):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"--set {override}: '{'.'.join(parts[: i + 1])}' is not a table")
        table[parts[-1]] = _override_value(text.strip(), _type_at(struct, parts))


def _override_value(text: str, wanted: Any) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(value) != {"value"}:  # a line break in `text` began another key
        return text
    # job.time=01:00:00 is a time of day in TOML and name=12 a number, but these fields hold text.
    if (wanted is str and not isinstance(value["value"], str)) or isinstance(value["value"], datetime.time):
        return text
    return value["value"]


# ------------------------------------------------------------------------------------------------ parsing


def parse(data: dict[str, Any], struct: type[_StructT], source: str) -> _StructT:
    """`data` as `struct`; raises UserError that begins with `source` and names the key."""
    _refuse_unknown(data, struct, [], source)
    try:
        return msgspec.convert(data, struct)
    except msgspec.ValidationError as error:
        raise UserError(_explain(str(error), data, struct, source)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: can't be read as TOML text: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.match(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)\Z", str(error), re.DOTALL)
        line = found[2] if found and found[2] else str(max(1, len(text.splitlines())))
        raise UserError(f"{path}: line {line}: TOML syntax: {found[1] if found else error}") from error


def _refuse_unknown(data: Any, wanted: Any, path: list[str], source: str) -> None:
    if isinstance(data, list) and get_origin(wanted) is list:
        for i, item in enumerate(data):
            _refuse_unknown(item, get_args(wanted)[0], [*path[:-1], f"{path[-1]}[{i}]"], source)
        return
    wanted = _struct_of(wanted)
    if not (isinstance(data, dict) and isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)):
        return
    hints = get_type_hints(wanted)
    for key, value in data.items():
        if key not in hints:
            where = ".".join([*path, key])
            raise UserError(f"{source}: unknown key '{where}'{_hint(key, hints, path)}")
        _refuse_unknown(value, hints[key], [*path, key], source)


def _struct_of(wanted: Any) -> Any:
    """The struct of a union that has one ("a table or a string"), otherwise `wanted` itself."""
    if get_origin(wanted) in (Union, types.UnionType):
        structs = [tp for tp in get_args(wanted) if isinstance(tp, type) and issubclass(tp, msgspec.Struct)]
        return structs[0] if len(structs) == 1 else wanted
    return wanted


def _hint(key: str, hints: dict[str, Any], path: list[str]) -> str:
    near = get_close_matches(key, hints, 1, cutoff=0.5)
    if near:
        return f": did you mean '{near[0]}'?"
    # A key that stands in the wrong table is the next likeliest slip.
    if not path:
        for section, tp in hints.items():
            if isinstance(tp, type) and issubclass(tp, msgspec.Struct) and key in tp.__struct_fields__:
                return f": did you mean '{section}.{key}'?"
    return f": expected one of {', '.join(sorted(hints))}"


def _explain(message: str, data: dict[str, Any], struct: type[msgspec.Struct], source: str) -> str:
    """msgspec's error in the user's terms: key, value seen, type expected."""
    found = _MESSAGE.match(message)
    if found is None:
        return f"{source}: {message}"
    steps = re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", found["path"] or "")
    parts = [name or f"[{index}]" for name, index in steps]
    where = ".".join(parts).replace(".[", "[")
    wanted = _type_at(struct, parts)
    missing = _MISSING.match(found["what"])
    if missing:
        key = f"{where}.{missing[1]}" if where else missing[1]
        return f"{source}: missing key '{key}': expected {_describe(_type_at(struct, [*parts, missing[1]]))}"
    seen: Any = data
    for name, index in steps:
        if index == "...":
            break
        seen = seen[int(index)] if index else seen[name]
    expected = f"expected {_describe(wanted)}, seen {type(seen).__name__}{_near(seen, wanted)}"
    return f"{source}: '{where}' = {_show(seen)}: {expected}"


def _type_at(struct: Any, parts: list[str]) -> Any:
    """The declared type at a key path; Any where the path leaves the declared structs."""
    wanted = struct
    for part in parts:
        wanted = _struct_of(wanted)
        if part.startswith("["):
            arguments = get_args(wanted)
            wanted = arguments[-1] if arguments else Any
        elif isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
            wanted = get_type_hints(wanted).get(part, Any)
        else:
            return Any
    return wanted


def _near(seen: Any, wanted: Any) -> str:
    """The choice that was meant, where a field takes one of some words."""
    near = get_close_matches(seen, _choices(wanted), 1) if isinstance(seen, str) else []
    return f": did you mean '{near[0]}'?" if near else ""


def _choices(wanted: Any) -> list[str]:
    """The words of a Literal, also of those in a union; no empty one, which stands for nothing chosen."""
    if get_origin(wanted) is Literal:
        return [choice for choice in get_args(wanted) if isinstance(choice, str) and choice]
    if get_origin(wanted) in (Union, types.UnionType):
        return [choice for part in get_args(wanted) for choice in _choices(part)]
    return []


def _describe(wanted: Any) -> str:
    origin = get_origin(wanted)
    if origin is Literal:
        return _one_of(get_args(wanted))
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(wanted) if part is not type(None)]
        if all(get_origin(part) is Literal for part in parts):
            return _one_of(choice for part in parts for choice in get_args(part))
        return " or ".join(map(_describe, parts))
    if origin is list:
        return f"a list of {_describe(get_args(wanted)[0])}"
    if origin is dict or (isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)):
        return "a table"
    return getattr(wanted, "__name__", str(wanted))


def _one_of(choices: Iterable[Any]) -> str:
    return "one of " + ", ".join(map(repr, choices))


def _show(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return f"{value.isoformat()} without quotes"
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
