"""What environments share: their options as structs, and the dealing of tasks to splits."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from miles_hpc.core.errors import UserError

__all__ = ["SPLITS", "deal", "parse_options", "pick"]

SPLITS = ("train", "eval", "demo")

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
_ItemT = TypeVar("_ItemT")


def parse_options(options: dict[str, Any] | None, struct: type[_StructT], environment: str) -> _StructT:
    """`[environment.options]` as `struct`. Raises UserError with the known names for anything else."""
    try:
        return msgspec.convert(options or {}, struct)
    except msgspec.ValidationError as error:
        known = ", ".join(struct.__struct_fields__)
        raise UserError(f"environment.options: {error}; the {environment} environment knows {known}") from error


def deal(task: bytes, *, eval_share: float, demo_share: float) -> str:
    """The split of a task, by BLAKE2b over what it is: new tasks never move old ones, equal tasks stay together."""
    digest = hashlib.blake2b(task, digest_size=8, person=b"miles_hpc.deal").digest()
    place = int.from_bytes(digest, "little") / 2**64
    if place < eval_share:
        return "eval"
    return "demo" if place < eval_share + demo_share else "train"


def pick(items: dict[str, list[_ItemT]], split: str, seed: int, hint: str) -> _ItemT:
    """The item of this seed. Seeds are spread evenly already, so the remainder will do. Raises UserError."""
    if split not in SPLITS:
        raise UserError(f"split {split!r}: expected one of {', '.join(SPLITS)}")
    if not items[split]:
        raise UserError(f"environment.options: no task is in split {split}: {hint}")
    return items[split][seed % len(items[split])]
