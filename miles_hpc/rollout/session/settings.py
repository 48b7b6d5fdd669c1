"""What a session is opened with, and the bounds of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from miles_hpc.core.errors import UserError
from miles_hpc.core.registry import names
from miles_hpc.rollout.session.chat import SamplingWish, whole
from miles_hpc.rollout.session.errors import BadRequest
from miles_hpc.rollout.session.openai_api import read_sampling
from miles_hpc.rollout.session.template import CHAT_FAMILIES

__all__ = ["SessionLimits", "SessionSettings", "read_settings"]

_FIELDS = ("history", "max_rollback", "matcher", "tool_parser", "chat_family", "sampling", "seed", "metadata")
_MOST_ROLLBACK = 1 << 20
_MOST_SEED = 2**63 - 1


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one session's requests are placed, rendered, sampled and parsed. Stays as it is for the session's life."""

    history: Literal["linear", "tree"] = "linear"
    max_rollback: int = 1  # linear: assistant turns that one request may take back
    matcher: str = "strict"
    tool_parser: str = "none"
    chat_family: str = "default"
    sampling: SamplingWish = SamplingWish()
    seed: int | None = None  # request n, from 0, that gives no seed gets one that follows from this and n
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What one server takes. Raises UserError for a bound that nothing fits into."""

    body_bytes: int = 64 << 20  # of one request
    messages: int = 4096  # of one request
    sessions: int = 4096
    in_flight: int = 16  # requests of one session
    context_tokens: int = 1 << 17  # prompt and output of one request
    session_tokens: int = 1 << 22  # recorded over all branches of a session
    turns: int = 1024  # recorded over all branches of a session with history tree
    metadata_bytes: int = 1 << 16
    ttl_s: float = 4 * 3600.0  # a session without requests is closed after so long
    request_s: float = 600.0  # one request, from its arrival on
    keep_alive_s: float = 10.0  # a streaming client hears something so often

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"session server: {name} {value}: expected more than 0")


def read_settings(body: Any, defaults: SessionSettings) -> SessionSettings:
    """The settings of a session to open. Raises BadRequest.

    Matchers and parsers are named; a dotted path is for the run's own settings only: what comes over HTTP must not
    choose which module this process imports.
    """
    if body is None:
        return defaults
    if not isinstance(body, Mapping):
        raise BadRequest(f"request body: expected a JSON object or nothing, found {type(body).__name__}")
    for name in body:
        if name not in _FIELDS:
            raise BadRequest(f"field '{name}': expected one of {', '.join(_FIELDS)}", param=name)
    given = {name: value for name, value in body.items() if value is not None}
    _check_choice(given, "history", ["linear", "tree"])
    _check_choice(given, "matcher", [*names("matcher"), defaults.matcher])
    _check_choice(given, "tool_parser", [*names("tool_parser"), defaults.tool_parser])
    _check_choice(given, "chat_family", sorted(CHAT_FAMILIES))
    rollback = given.get("max_rollback", 0)
    if isinstance(rollback, bool) or not isinstance(rollback, int) or not 0 <= rollback <= _MOST_ROLLBACK:
        text = f"max_rollback={rollback!r:.40}: expected a whole number from 0 to {_MOST_ROLLBACK}"
        raise BadRequest(text, param="max_rollback")
    if "seed" in given:
        given["seed"] = whole(given, "seed", 0, _MOST_SEED)
    if not isinstance(given.get("metadata", {}), dict):
        raise BadRequest("metadata: expected an object", param="metadata")
    if "sampling" in given:
        given["sampling"] = read_sampling(given["sampling"]).over(defaults.sampling)
    return msgspec.structs.replace(defaults, **given)


def _check_choice(given: Mapping[str, Any], name: str, choices: list[str]) -> None:
    value = given.get(name)
    if value is not None and value not in choices:
        raise BadRequest(f"{name}={value!r:.60}: expected one of {', '.join(dict.fromkeys(choices))}", param=name)
