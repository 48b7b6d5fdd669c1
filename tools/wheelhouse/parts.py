"""A wheelhouse in parts of a bounded size, and back: nothing is unpacked before every part is right.

    wheels ─▶ one tar stream ─▶ wheels.tar.000, .001, ... ─▶ manifest.json, written last
    parts  ─▶ sizes and digests ─▶ tar stream ─▶ each wheel's digest ─▶ folder, by one rename

The tar holds the wheels by name and nothing else; it is never extracted by its own names.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from checkpoints.publish import publish_bytes, publish_folder
from miles_hpc.core.errors import IntegrityError, UserError
from tools.wheelhouse.resolve import sha256_of
from tools.wheelhouse.target import Target

__all__ = ["MANIFEST", "Entry", "Manifest", "pack", "read_manifest", "unpack", "verify"]

MANIFEST = "manifest.json"
_BLOCK = 1 << 20


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file and what it must be. `dropped`: members that pruning has left out of a wheel."""

    file: str
    n_bytes: int
    sha256: str
    dropped: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written beside the parts, and into the folder that they are unpacked to."""

    target: Target
    requirements: tuple[str, ...]
    wheels: tuple[Entry, ...]
    parts: tuple[Entry, ...]


def pack(
    wheels: Sequence[tuple[Path, Sequence[str]]],
    folder: Path,
    *,
    target: Target,
    requirements: Sequence[str],
    part_bytes: int,
) -> Manifest:
    """Write wheels, each with what was dropped from it, as parts of at most `part_bytes` into a new folder.

    Raises UserError for an existing folder, no wheels, two of one name, and part sizes below 64 KiB.
    """
    names = [path.name for path, _ in wheels]
    if folder.exists():
        raise UserError(f"{folder}: exists: expected a folder that is to be made")
    if not names or len(set(names)) != len(names):
        raise UserError(f"{len(names)} wheels, {len(set(names))} names: expected some, each with a name of its own")
    if part_bytes < 64 << 10:
        raise UserError(f"--part-bytes {part_bytes}: expected at least {64 << 10}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheelhouse-") as temporary:
        work = Path(temporary) / "parts"
        work.mkdir()
        entries = tuple(
            Entry(file=path.name, n_bytes=path.stat().st_size, sha256=sha256_of(path), dropped=tuple(dropped))
            for path, dropped in sorted(wheels, key=lambda wheel: wheel[0].name)
        )
        by_name = {path.name: path for path, _ in wheels}
        splitter = _Splitter(work, part_bytes)
        with tarfile.open(fileobj=splitter, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            for entry in entries:
                info = tarfile.TarInfo(entry.file)  # no owner and no time: the same wheels give the same parts
                info.size = entry.n_bytes
                with by_name[entry.file].open("rb") as file:
                    tar.addfile(info, file)
        parts = splitter.finish()
        manifest = Manifest(target=target, requirements=tuple(requirements), wheels=entries, parts=parts)
        publish_bytes(work / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        publish_folder(work, folder)
    return manifest


def unpack(source: Path, folder: Path) -> Manifest:
    """Check all parts in `source`, then make `folder` with the wheels. Raises IntegrityError, UserError."""
    if folder.exists():
        raise UserError(f"{folder}: exists: expected a folder that is to be made")
    manifest = verify(source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheelhouse-") as temporary:
        work = Path(temporary) / "wheels"
        work.mkdir()
        try:
            _extract(source, manifest, work)
        except tarfile.TarError as error:
            raise IntegrityError(f"{source}: parts that are right don't make a tar file: {error}") from error
        shutil.copyfile(source / MANIFEST, work / MANIFEST)
        publish_folder(work, folder)
    return manifest


def verify(folder: Path) -> Manifest:
    """Compare parts, or the wheels of an unpacked folder, with its manifest. Raises IntegrityError, UserError."""
    manifest = read_manifest(folder)
    is_unpacked = any((folder / wheel.file).exists() for wheel in manifest.wheels)
    entries = manifest.wheels if is_unpacked else manifest.parts
    for entry in entries:
        path = folder / entry.file
        if not path.is_file():
            raise IntegrityError(f"{path}: is missing: copy it again")
        if path.stat().st_size != entry.n_bytes:
            raise IntegrityError(f"{path}: {path.stat().st_size} bytes: expected {entry.n_bytes}; copy it again")
        if (seen := sha256_of(path)) != entry.sha256:
            raise IntegrityError(f"{path}: SHA-256 {seen[:12]}...: expected {entry.sha256[:12]}...; copy it again")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError when there is none, or one with names that aren't plain."""
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: {error}: expected what 'wheelhouse pack' or 'unpack' has written") from error
    for entry in (*manifest.wheels, *manifest.parts):
        if Path(entry.file).name != entry.file or entry.file in ("", ".", "..", MANIFEST):
            raise UserError(f"{path}: file name {entry.file!r}: expected a plain one")
    if not manifest.wheels or not manifest.parts:
        raise UserError(f"{path}: no wheels or no parts in it")
    return manifest


# ------------------------------------------------------------------------------------------------ streams


class _Splitter:
    """A file object for writing that goes on in the next part when one is full."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._parts: list[Entry] = []
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self._n = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if self._file is None:
                self._file = (self._folder / f"wheels.tar.{len(self._parts):03}").open("wb")
                self._digest, self._n = hashlib.sha256(), 0
            piece = view[: self._part_bytes - self._n]
            self._file.write(piece)
            self._digest.update(piece)
            self._n += len(piece)
            view = view[len(piece) :]
            if self._n == self._part_bytes:
                self._close()
        return len(data)

    def finish(self) -> tuple[Entry, ...]:
        self._close()
        return tuple(self._parts)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._parts.append(Entry(file=Path(self._file.name).name, n_bytes=self._n, sha256=self._digest.hexdigest()))
            self._file = None


class _Joined(io.RawIOBase):
    """The parts as one stream."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._blocks = self._read_all(paths)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = next(self._blocks, b"")
        piece, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    @staticmethod
    def _read_all(paths: Sequence[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    yield block


def _extract(source: Path, manifest: Manifest, work: Path) -> None:
    wanted = {entry.file: entry for entry in manifest.wheels}
    stream = io.BufferedReader(_Joined([source / part.file for part in manifest.parts]), _BLOCK)
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for info in tar:
            entry = wanted.pop(info.name, None)
            file = tar.extractfile(info) if info.isreg() else None
            if entry is None or file is None or info.size != entry.n_bytes:
                raise IntegrityError(f"{source}: {info.name!r} in the parts: the manifest has no such wheel")
            digest = hashlib.sha256()
            with (work / entry.file).open("wb") as target:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    target.write(block)
            if digest.hexdigest() != entry.sha256:
                raise IntegrityError(f"{source}: {entry.file}: not the wheel that was packed")
    if wanted:
        raise IntegrityError(f"{source}: {', '.join(sorted(wanted))} of the manifest aren't in the parts")
