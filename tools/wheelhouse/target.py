"""The machine that the wheels are for: its Python, its platform, what is installed there."""

from __future__ import annotations

import json
import re
from typing import Literal

import msgspec

from miles_hpc.core.errors import UserError

__all__ = ["Target", "canonical", "parse_installed"]

_VERSION = re.compile(r"3\.(\d{1,2})(?:\.(\d{1,3}))?\Z")
_GLIBC = re.compile(r"2\.(\d{1,3})\Z")
_FROZEN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;#]+)\Z")
_FROM_ELSEWHERE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*) @ \S+\Z")


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPython on Linux. `installed` maps names in canonical form to versions, as the target's pip lists them."""

    python: str  # 3.12 or 3.12.3
    machine: Literal["x86_64", "aarch64"] = "x86_64"
    glibc: str = "2.28"  # what `ldd --version` says there
    installed: dict[str, str] = {}

    def check(self) -> None:
        """Raises UserError for what isn't a Python or glibc version."""
        if not _VERSION.match(self.python):
            raise UserError(f"--python {self.python}: expected a version such as 3.12 or 3.12.3")
        if not _GLIBC.match(self.glibc):
            raise UserError(f"--glibc {self.glibc}: expected a version such as 2.28, which 'ldd --version' tells there")

    @property
    def minor(self) -> int:
        return int(self.python.split(".")[1])

    @property
    def platforms(self) -> list[str]:
        """Platform tags that this machine takes, the newest first (PEP 600; manylinux1, 2010 and 2014 are aliases)."""
        newest = int(self.glibc.split(".")[1])
        tags = [f"manylinux_2_{n}_{self.machine}" for n in range(newest, 4, -1)]
        aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        tags += [f"{name}_{self.machine}" for least, name in aliases.items() if newest >= least]
        return [*tags, f"linux_{self.machine}"]

    def pip_options(self) -> list[str]:
        """What makes pip choose wheels of this target."""
        platforms = [part for tag in self.platforms for part in ("--platform", tag)]
        python = ["--python-version", self.python, "--implementation", "cp", "--abi", f"cp3{self.minor}"]
        return ["--only-binary=:all:", *python, *platforms]

    def markers(self) -> dict[str, str]:
        """The environment in which the markers of dependencies are evaluated (PEP 508)."""
        full = self.python if self.python.count(".") == 2 else f"{self.python}.0"
        return {
            "implementation_name": "cpython",
            "implementation_version": full,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": full,
            "python_version": f"3.{self.minor}",
            "sys_platform": "linux",
        }


def canonical(name: str) -> str:
    """A package's name in canonical form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_installed(text: str) -> dict[str, str]:
    """Names and versions from `pip freeze` or `pip list --format=json` of the target. Raises UserError with the line.

    Of a package that was installed from a folder or an address, `freeze` doesn't tell the version: use the other.
    """
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
            return {canonical(item["name"]): str(item["version"]) for item in listed}
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"installed packages: {error}: expected what 'pip list --format=json' prints") from error
    installed: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _FROZEN.match(line)
        if found is None:
            hint = "use 'pip list --format=json' there" if _is_elsewhere(line) else "expected NAME==VERSION"
            raise UserError(f"installed packages, line {number}: {line[:80]!r}: {hint}")
        installed[canonical(found.group(1))] = found.group(2)
    return installed


def _is_elsewhere(line: str) -> bool:
    return line.startswith("-e ") or _FROM_ELSEWHERE.match(line) is not None
