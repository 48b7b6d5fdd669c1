"""What moves frames: the part of a transport that differs between tcp, ucx, mpi and loopback.

    Carrier ── listen(accepted) ──▶ Port                    callbacks only: nothing here waits, so that
            └─ dial(address, ...) ─▶ Wire                   both faces run on the same code
    Wire    handshake messages (whole, small) ── start_frames(sealer, opener) ──▶ sealed frames

| callback of a wire | when |
|---|---|
| on_message(bytes) | a whole handshake message has arrived; only before start_frames |
| on_frame(kind, call_id, header, payload) | a verified frame has arrived; payload is read-only |
| on_lost(reason) | the connection ended, once; not after close() or abandon() |
| on_violated(reason) | the peer sent what doesn't verify; nothing more is read, sending still works; once |
| on_drained() | the queue of outgoing bytes went below LOW_WATER_BYTES |

Callbacks run inside the loop's own callbacks, never inside a call of the owner. A wire belongs to one loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from miles_hpc.control.frames import Opener, Sealer

__all__ = ["LOW_WATER_BYTES", "Carrier", "Loop", "Port", "TimerHandle", "Wire"]

#: `on_drained` is called when fewer bytes than this are left in a queue that had more.
LOW_WATER_BYTES = 1 << 20


class TimerHandle(Protocol):
    """What call_later returns."""

    def cancel(self) -> None: ...


class Loop(Protocol):
    """What is needed of an event loop. asyncio's loops have it, and PlainLoop."""

    def time(self) -> float: ...

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> Any: ...

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> Any: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any: ...

    def add_reader(self, fd: int, callback: Callable[..., Any]) -> None: ...

    def remove_reader(self, fd: int) -> Any: ...

    def add_writer(self, fd: int, callback: Callable[..., Any]) -> None: ...

    def remove_writer(self, fd: int) -> Any: ...


def _ignore(*_: object) -> None:
    return


class Wire(ABC):
    """One connection. Starts by exchanging handshake messages; then frames, after `start_frames`."""

    on_message: Callable[[bytes], None]
    on_frame: Callable[[int, int, bytes, memoryview], None]
    on_lost: Callable[[str], None]
    on_violated: Callable[[str], None]
    on_drained: Callable[[], None]
    #: Who is at the other end, for logs, before it has said so itself.
    remote: str

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self.silence()

    def silence(self) -> None:
        """Forget all callbacks."""
        self.on_message = self.on_frame = self.on_lost = self.on_violated = self.on_drained = _ignore

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Bytes that were sent here and aren't handed over yet."""

    @abstractmethod
    def send_message(self, data: bytes) -> None:
        """Send a handshake message of at most MAX_HANDSHAKE_BYTES."""

    @abstractmethod
    def start_frames(self, sealer: Sealer, opener: Opener) -> None:
        """From the next byte on, in both directions, there are frames."""

    @abstractmethod
    def send(
        self,
        kind: int,
        call_id: int,
        header: bytes,
        views: Sequence[memoryview],
        n_bytes: int,
        handed_over: Callable[[], None] | None = None,
    ) -> bool:
        """Queue one frame; `views` hold `n_bytes` of payload. It leaves with the next `flush` at the latest.

        Returns True when the payload's buffers aren't needed any more; else `handed_over` is called when that is so, or
        never when the connection is lost. Raises ProtocolError when the frame is larger than the limits; nothing is
        queued then. On a lost connection nothing happens: `on_lost` has told.
        """

    @abstractmethod
    def flush(self) -> None:
        """Hand over what is queued as far as it goes without waiting."""

    @abstractmethod
    def close(self, flush_s: float) -> None:
        """Orderly end: what is queued still leaves within `flush_s`. No callback follows."""

    @abstractmethod
    def abandon(self) -> None:
        """End now. No callback follows."""


class Port(ABC):
    """Where connections come in."""

    address: str

    @abstractmethod
    def close(self) -> None:
        """Take no more connections; those that were accepted aren't touched."""


class Carrier(ABC):
    """A kind of wire, on one loop."""

    scheme: str

    @abstractmethod
    def listen(self, bind: str, accepted: Callable[[Wire], None]) -> Port:
        """Bind and call `accepted` with each incoming wire. Raises UserError when `bind` isn't ours."""

    @abstractmethod
    def dial(
        self, address: str, connected: Callable[[Wire], None], failed: Callable[[Exception], None]
    ) -> Callable[[], None]:
        """Begin to connect; one of the callbacks follows, later. Returns what gives it up: then none does.

        `failed` gets PeerLost. Raises UserError for an address of another form.
        """

    @abstractmethod
    def chosen(self) -> dict[str, str]:
        """What the carrier runs on: library, version, devices."""

    @abstractmethod
    def close(self) -> None:
        """Release what all wires share; they were closed before."""
