"""What of a Dockerfile can be done without building an image: its files, its working folder, its variables.

    FROM debian:12              not applied: the sandbox has the node's /usr
    WORKDIR /app                the working folder
    COPY src/ conf.ini ./       files of the build context, with --chmod
    ENV LEVEL=2                 a variable of every command
    RUN apt-get install gcc     not applied

| instruction | |
|---|---|
| COPY, ADD | applied for files of the context; not `--from`, archives and addresses that ADD would fetch |
| WORKDIR, ENV | applied; not with variables in them |
| LABEL MAINTAINER EXPOSE STOPSIGNAL CMD ARG, USER root | without effect on what an agent sees |
| all others | not applied |

The last stage of several counts. Format: https://docs.docker.com/reference/dockerfile/ (COPY: a folder's contents are
copied, not the folder; a target that ends with a slash or is a folder already takes files by their names). Pure.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from miles_hpc.core.errors import UserError

__all__ = ["Copied", "DockerPlan", "Instruction", "plan_dockerfile", "read_instructions"]

_WITHOUT_EFFECT = frozenset({"LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL", "CMD", "ARG"})
_HEREDOC = re.compile(r"<<-?(['\"]?)([A-Za-z_]\w*)\1")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)\Z")
_VARIABLE = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continuation lines joined. `line` is where it begins, from 1."""

    line: int
    name: str  # in capitals
    rest: str
    heredoc: bool = False

    def __str__(self) -> str:
        text = f"{self.name} {' '.join(self.rest.split())}"
        return (text if len(text) <= 60 else text[:57] + "...") + f" (line {self.line})"


@dataclass(frozen=True, slots=True)
class Copied:
    """A file of the build context and its absolute place; `mode` None = as the file's own."""

    source: str
    target: str
    mode: int | None = None


@dataclass
class DockerPlan:
    """What can be done. `workdir` is "" when the file names none."""

    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict)
    copies: list[Copied] = field(default_factory=list)
    not_applied: list[str] = field(default_factory=list)


def read_instructions(text: str) -> list[Instruction]:
    """Split a Dockerfile: comments dropped, lines joined after a backslash, here-documents skipped."""
    found = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        begin = at
        joined = ""
        while at < len(lines):
            line = lines[at]
            at += 1
            if line.lstrip().startswith("#") or (joined and not line.strip()):
                continue
            goes_on = line.rstrip().endswith("\\")
            joined += line.rstrip()[:-1] + " " if goes_on else line
            if not goes_on:
                break
        name, _, rest = joined.strip().partition(" ")
        if not name:
            continue
        ends = [match.group(2) for match in _HEREDOC.finditer(rest)] if name.upper() in ("RUN", "COPY", "ADD") else []
        for end in ends:
            while at < len(lines) and lines[at].strip() != end:
                at += 1
            at += 1
        found.append(Instruction(begin + 1, name.upper(), rest.strip(), bool(ends)))
    return found


def plan_dockerfile(text: str, context: Sequence[str], *, default_workdir: str) -> DockerPlan:
    """What this Dockerfile does with `context`, the relative paths of the files beside it.

    Raises UserError, which names the line, for a COPY whose source isn't there.
    """
    plan = DockerPlan()
    for step in read_instructions(text):
        if step.name == "FROM":
            plan = DockerPlan(not_applied=[] if step.rest.split()[:1] == ["scratch"] else [str(step)])
        elif step.name in _WITHOUT_EFFECT or (step.name == "USER" and step.rest in ("root", "0")):
            continue
        elif step.name == "WORKDIR" and step.rest and "$" not in step.rest:
            plan.workdir = _absolute(step.rest.strip("'\""), plan.workdir or default_workdir)
        elif step.name == "ENV" and (variables := _variables(step.rest)) is not None:
            plan.env.update(variables)
        elif step.name in ("COPY", "ADD") and (files := _copy(step, plan, context, default_workdir)) is not None:
            plan.copies += files
        else:
            plan.not_applied.append(str(step))
    return plan


def _variables(rest: str) -> dict[str, str] | None:
    """`ENV K=V L="W X"` or `ENV K V`; None for what can't be done."""
    try:
        words = shlex.split(rest)
    except ValueError:
        return None
    if "$" in rest or not words:
        return None
    if "=" not in words[0]:
        words = [f"{words[0]}={' '.join(words[1:])}"]
    pairs = [word.partition("=") for word in words]
    if not all(equals and _VARIABLE.match(name) for name, equals, _ in pairs):
        return None
    return {name: value for name, _, value in pairs}


def _copy(step: Instruction, plan: DockerPlan, context: Sequence[str], default_workdir: str) -> list[Copied] | None:
    """The files that a COPY or ADD brings; None for what can't be done."""
    mode: int | None = None
    rest = step.rest
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        key, _, value = flag.partition("=")
        rest = rest.strip()
        if key == "--chmod" and re.fullmatch(r"0?[0-7]{3}", value):
            mode = int(value, 8)
        elif key not in ("--chown", "--link"):
            return None
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        return None
    if step.heredoc or "$" in rest or len(words) < 2 or not all(isinstance(word, str) for word in words):
        return None
    *sources, target = words
    if step.name == "ADD" and any(":" in s or _ARCHIVE.search(s) for s in sources):
        return None
    place = _absolute(target, plan.workdir or default_workdir)
    there = [plan.workdir or default_workdir, *(str(PurePosixPath(c.target).parent) for c in plan.copies)]
    is_folder = (
        target.endswith(("/", "/.", "/.."))
        or target in (".", "..")
        or len(sources) > 1
        or any(path == place or path.startswith(f"{place.rstrip('/')}/") for path in there)
    )
    files: list[Copied] = []
    for source in sources:
        found = _matches(source, context)
        if found is None:
            return None
        if not found:
            raise UserError(f"Dockerfile line {step.line}: {step.name} {source}: no such file beside the Dockerfile")
        for name, inside in found:
            whole = f"{place}/{inside}" if inside else f"{place}/{PurePosixPath(name).name}" if is_folder else place
            files.append(Copied(name, _absolute(whole, "/"), mode))
    return files


def _matches(pattern: str, context: Sequence[str]) -> list[tuple[str, str]] | None:
    """(file, path inside the folder that the pattern names; "" when it names the file). None when it leads outside."""
    parts = [part for part in PurePosixPath(pattern.lstrip("/") or ".").parts if part != "."]
    if ".." in parts:
        return None
    found = []
    for name in context:
        path = PurePosixPath(name).parts
        if len(path) >= len(parts) and all(fnmatchcase(a, b) for a, b in zip(path, parts, strict=False)):
            found.append((name, "/".join(path[len(parts) :])))
    return found


def _absolute(path: str, base: str) -> str:
    """`path` from `base`, without '.' and '..'."""
    parts: list[str] = []
    for part in PurePosixPath(base, path).parts[1:]:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/" + "/".join(parts)
