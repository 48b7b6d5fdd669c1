"""What the run file and the site file share: the base of their sections, and the table of interpreters."""

from __future__ import annotations

import msgspec

__all__ = ["PythonConfig", "Section"]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: frozen, keyword-only, unknown keys refused."""


class PythonConfig(Section, frozen=True, kw_only=True):
    """Python interpreters per role; "" = the one that submits."""

    controller: str = ""
    trainer: str = ""
    rollout: str = ""
    sandbox: str = ""
    sglang: str = ""  # of SGLang's own environment, which rollout.engine = "sglang" starts
