"""Wheels without what a GPU doesn't need: members left out, RECORD and name made right again.

A kernel wheel carries binaries for many GPU architectures, in folders or files named so (`sm90/`, `ops_sm100.so`).
A pruned wheel has a build tag, `0pruned`, so that nobody takes it for the original; pip installs it like any other.
Format: PyPA, binary distribution format (RECORD: path, digest, size; one line per file, its own without both).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from miles_hpc.core.errors import UserError

__all__ = ["dropped_members", "prune_wheel"]

_ARCHITECTURE = re.compile(r"(?:^|[/_.-])sm_?(\d{2,3})[af]?(?=[/_.-]|$)")
_BUILD = "0pruned"


def dropped_members(names: Sequence[str], *, drop: Sequence[str] = (), gpus: Sequence[int] = ()) -> list[str]:
    """Which members go: those that match a pattern of `drop`, and those for GPUs of other architectures than `gpus`.

    `gpus` are compute capabilities, 90 for an H100 or H200; empty keeps all. A member whose path names several
    architectures goes when none of them is wanted. Metadata always stays.
    """
    gone = []
    for name in names:
        if ".dist-info/" in name:
            continue
        architectures = {int(found) for found in _ARCHITECTURE.findall(name)}
        other = bool(gpus) and bool(architectures) and not architectures & set(gpus)
        if other or any(fnmatchcase(name, pattern) for pattern in drop):
            gone.append(name)
    return gone


def prune_wheel(
    path: Path, folder: Path, *, drop: Sequence[str] = (), gpus: Sequence[int] = ()
) -> tuple[Path, list[str]]:
    """A wheel without these members in `folder`, and what was left out; the wheel itself when nothing is.

    Raises UserError for what isn't a wheel.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            gone = dropped_members(wheel.namelist(), drop=drop, gpus=gpus)
            if not gone:
                return path, []
            final = folder / _pruned_name(path.name)
            temporary = folder / f".{final.name}.tmp"
            try:
                with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as pruned:
                    _copy(wheel, pruned, set(gone))
                temporary.replace(final)
            finally:
                temporary.unlink(missing_ok=True)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{path.name}: {error}: expected a wheel") from error
    return final, gone


def _copy(wheel: zipfile.ZipFile, pruned: zipfile.ZipFile, gone: set[str]) -> None:
    record = next((name for name in wheel.namelist() if name.endswith(".dist-info/RECORD")), None)
    if record is None:
        raise KeyError("no .dist-info/RECORD in it")
    lines = {row[0]: row for row in csv.reader(io.StringIO(wheel.read(record).decode())) if row}
    about = f"{record.rpartition('/')[0]}/WHEEL"
    for info in wheel.infolist():
        name = info.filename
        if name in gone or name == record or name.endswith((".dist-info/RECORD.jws", ".dist-info/RECORD.p7s")):
            lines.pop(name, None)  # signatures are of the old RECORD
            continue
        if name == about:
            data = _with_build(wheel.read(info))
            lines[name] = [name, _digest(data), str(len(data))]
            pruned.writestr(info, data, zipfile.ZIP_DEFLATED)
            continue
        with wheel.open(info) as source, pruned.open(_plain(info), "w", force_zip64=True) as target:
            while block := source.read(1 << 20):
                target.write(block)
    lines[record] = [record, "", ""]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines.values())
    pruned.writestr(record, text.getvalue())


def _plain(info: zipfile.ZipInfo) -> zipfile.ZipInfo:
    copy = zipfile.ZipInfo(info.filename, info.date_time)
    copy.external_attr = info.external_attr  # modes
    copy.compress_type = zipfile.ZIP_STORED if info.is_dir() else zipfile.ZIP_DEFLATED
    return copy


def _with_build(data: bytes) -> bytes:
    lines = [line for line in data.decode().splitlines() if line.strip() and not line.startswith("Build:")]
    return ("\n".join([*lines, f"Build: {_BUILD}"]) + "\n").encode()


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _pruned_name(name: str) -> str:
    """NAME-VERSION(-BUILD)-PYTHON-ABI-PLATFORM.whl with our build tag."""
    parts = name.removesuffix(".whl").split("-")
    if not name.endswith(".whl") or len(parts) not in (5, 6):
        raise UserError(f"{name}: expected a wheel's name, NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    return "-".join([*parts[:2], _BUILD, *parts[-3:]]) + ".whl"
