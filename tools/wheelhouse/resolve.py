"""What a target lacks, and the wheels of it: pip resolves, pip downloads.

requirements, Target ─▶ pip install --dry-run --report ─▶ Plan ─▶ pip download --no-deps --require-hashes ─▶ wheels
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.core.errors import UserError
from tools.wheelhouse import pip_for_target
from tools.wheelhouse.target import Target, canonical

__all__ = ["Plan", "Wheel", "fetch", "make_plan", "read_plan", "sha256_of", "write_plan"]

_RESOLVE_S = 1800.0
_DOWNLOAD_S = 3600.0  # one wheel


class Wheel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wheel to fetch. `replaces` is the version on the target that it takes the place of, "" for a new package."""

    name: str
    version: str
    file: str
    sha256: str
    replaces: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `plan` writes and `fetch` reads."""

    target: Target
    requirements: tuple[str, ...]
    wheels: tuple[Wheel, ...]


def make_plan(
    target: Target, requirements: Sequence[str], *, pip_options: Sequence[str] = (), upgrade: bool = False
) -> Plan:
    """Ask pip's resolver which wheels the requirements need beyond what the target has.

    `pip_options` say where packages are (--index-url, --find-links, ...). Raises UserError for what pip can't resolve,
    and, without `upgrade`, for requirements that would replace what is installed there.
    """
    target.check()
    with tempfile.TemporaryDirectory(prefix="wheelhouse-") as temporary:
        report = Path(temporary) / "report.json"
        options = ["install", "--dry-run", "--quiet", "--report", str(report), *target.pip_options(), *pip_options]
        _pip(Path(temporary), target, [*options, "--", *requirements], _RESOLVE_S)
        found = json.loads(report.read_text())["install"]
    wheels = sorted((_wheel(item, target) for item in found), key=lambda wheel: wheel.name)
    replaced = [f"{wheel.name} {wheel.replaces} by {wheel.version}" for wheel in wheels if wheel.replaces]
    if replaced and not upgrade:
        raise UserError(
            f"the requirements would replace {', '.join(replaced)} on the target: choose versions that fit what is "
            "there, or --upgrade"
        )
    return Plan(target=target, requirements=tuple(requirements), wheels=tuple(wheels))


def fetch(plan: Plan, folder: Path, *, pip_options: Sequence[str] = ()) -> list[Path]:
    """Download the plan's wheels into `folder`; those that are there and right are kept. Gives their paths.

    A wheel appears under its name only when its digest is the plan's. Raises UserError for one that can't be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for wheel in plan.wheels:
        path = folder / wheel.file
        if not path.is_file() or sha256_of(path) != wheel.sha256:
            _download(plan.target, wheel, path, pip_options)
        paths.append(path)
    return paths


def write_plan(plan: Plan, path: Path) -> None:
    publish_bytes(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def read_plan(path: Path) -> Plan:
    """Raises UserError for what isn't a plan."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: {error}: expected a plan, as 'wheelhouse plan' writes it") from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------ pip


def _download(target: Target, wheel: Wheel, path: Path, pip_options: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as temporary:
        work = Path(temporary)
        wanted = work / "wanted.txt"
        wanted.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
        got = work / "got"
        options = ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(got), *target.pip_options()]
        bare = msgspec.structs.replace(target, installed={})
        _pip(work, bare, [*options, *pip_options, "-r", str(wanted)], _DOWNLOAD_S)
        files = list(got.iterdir())
        if len(files) != 1 or sha256_of(files[0]) != wheel.sha256:
            raise UserError(f"{wheel.file}: pip gave {[file.name for file in files]}: expected the planned wheel")
        files[0].replace(path)


def _pip(work: Path, target: Target, arguments: list[str], timeout_s: float) -> None:
    """Run pip for the target. Raises UserError with pip's last line."""
    settings = work / "settings.json"
    settings.write_text(
        json.dumps({"pip": str(_pip_alone(work)), "site": str(_site(work, target)), "markers": target.markers()})
    )
    command = [sys.executable, "-I", "-S", str(Path(pip_for_target.__file__)), str(settings)]
    command += [arguments[0], "--disable-pip-version-check", "--no-input", *arguments[1:]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"pip {arguments[0]}: no end after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
        raise UserError(f"pip {arguments[0]}: {said[:400] or f'exit code {done.returncode}'}")


def _pip_alone(work: Path) -> Path:
    """A folder with this environment's pip and nothing else: what is beside it would count as installed."""
    try:
        import pip
    except ImportError as error:
        raise UserError(f"{sys.executable} has no pip: 'python -m ensurepip', or another environment") from error
    folder = work / "pip-alone"
    folder.mkdir(exist_ok=True)
    (folder / "pip").unlink(missing_ok=True)
    (folder / "pip").symlink_to(Path(pip.__file__).parent)
    return folder


def _site(work: Path, target: Target) -> Path:
    """A folder whose metadata says what is installed on the target. Their own dependencies count as met there."""
    folder = work / "site"
    for name, version in target.installed.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
    folder.mkdir(exist_ok=True)
    return folder


def _wheel(item: dict[str, object], target: Target) -> Wheel:
    """An entry of pip's installation report (pip.pypa.io/en/stable/reference/installation-report/)."""
    metadata, download = item["metadata"], item["download_info"]
    assert isinstance(metadata, dict) and isinstance(download, dict)
    name = canonical(metadata["name"])
    digest = download.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    file = unquote(urlsplit(download["url"]).path.rsplit("/", 1)[-1])
    if not digest or not file.endswith(".whl"):
        raise UserError(f"{name}: {file or download['url']}: expected a wheel with a SHA-256 digest")
    return Wheel(
        name=name, version=metadata["version"], file=file, sha256=digest, replaces=target.installed.get(name, "")
    )
