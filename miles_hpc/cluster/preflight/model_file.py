"""The Hugging Face config of a run's model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles_hpc.core.config import RunConfig

__all__ = ["model_config"]


def model_config(run: RunConfig) -> dict[str, Any]:
    """The run file's own table, or config.json of the model's folder; {} when that can't be read."""
    if not run.model.path:
        return run.model.config
    try:
        config = json.loads((Path(run.model.path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
