"""How one rank's exception reaches the controller although the other ranks are stuck in a collective.

    rank r: exception ─▶ post ─▶ waits for `reported` ─▶ exits non-zero
    rank 0, link thread: read ─▶ fails the call under way ─▶ acknowledge
    rank 0, main thread: its collective breaks when rank r is gone ─▶ exits non-zero

The board is a key of the world's TCPStore, whose server is rank 0. The first failure posted is the one that counts:
those that follow from it (a peer that went away) come later.
"""

from __future__ import annotations

import socket
import traceback
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from miles_hpc.core import errors
from miles_hpc.core.errors import MilesError, PeerLost

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Failure", "FailureBoard", "is_consequence"]

_FAILURE = "trainer/failure"
_REPORTED = "trainer/reported"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception of one rank, as other ranks and the controller learn of it."""

    rank: int
    host: str
    kind: str
    text: str
    details: str  # the traceback

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        lines = traceback.format_exception(error)
        return cls(
            rank=rank, host=socket.gethostname(), kind=type(error).__name__, text=str(error), details="".join(lines)
        )

    def error(self) -> MilesError:
        """Of the same class where it is one of ours, so that a caller's RemoteError tells the kind."""
        found: Any = getattr(errors, self.kind, MilesError)
        text = f"trainer rank {self.rank} on {self.host}: {self.kind}: {self.text}\n{self.details}"
        plain = isinstance(found, type) and issubclass(found, MilesError) and found is not errors.RemoteError
        return found(text) if plain else MilesError(text)


class FailureBoard:
    """One rank's access to the board. `store` must be a connection of its own: calls come from several threads."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def post(self, failure: Failure) -> None:
        """Make a failure known, unless another one was first."""
        self._store.compare_set(_FAILURE, "", msgspec.json.encode(failure).decode())

    def read(self) -> MilesError | None:
        """The error of the first failure, or None."""
        if not self._store.check([_FAILURE]):
            return None
        return msgspec.json.decode(self._store.get(_FAILURE), type=Failure).error()

    def acknowledge(self) -> None:
        """The failure was told to whoever waited."""
        self._store.set(_REPORTED, "1")

    def wait_reported(self, timeout_s: float) -> None:
        """Return when the failure was told, when nobody can be told, or after `timeout_s`."""
        try:
            self._store.wait([_REPORTED], timedelta(seconds=timeout_s))
        except RuntimeError:  # expired, or rank 0 is gone
            pass


def is_consequence(error: BaseException) -> bool:
    """Whether an error probably follows from another rank's: its cause may be on the board a moment later."""
    return isinstance(error, PeerLost) or (isinstance(error, RuntimeError) and not isinstance(error, MilesError))
