"""Many authenticated connections of an attacker at once, over any carrier, with the frames in the attacker's hands."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from miles_hpc.control.auth import SessionKeys
from miles_hpc.control.frames import Failure, Frame, Limits, Opener, Sealer
from miles_hpc.control.greeting import ConnectionSettings, Dialing
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.wire import Carrier, Wire
from miles_hpc.core.transport import Credentials
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import identity

__all__ = ["Attacker", "put_raw", "swarm"]

_PARALLEL = 16
_PATIENCE_S = 30.0
_ENOUGH_VIOLATIONS = 50
_failures = msgspec.msgpack.Decoder(Failure)


def put_raw(wire: Any, data: bytes) -> None:
    """Queue bytes as if they were a frame that the wire has sealed."""
    if hasattr(wire, "_queue"):  # tcp
        wire._queue(data)
    else:
        wire._out.append(data)
        wire._queued += len(data)


class Attacker(ABC):
    """One connection. Subclasses send in `go_on` once `admitted`, and set `fatal` to what must end the connection."""

    def __init__(self, wire: Wire, keys: SessionKeys, tally: Tally, limits: Limits) -> None:
        self.wire = wire
        self.tally = tally
        self.sealer = Sealer(keys.send_key, limits)
        self.admitted = False
        self.reason = ""  # that the target gave
        self.fatal = ""
        self.over = False
        wire.on_frame = self._frame
        wire.on_lost = self._lost
        wire.on_violated = self._unverified
        wire.start_frames(self.sealer, Opener(keys.receive_key, Limits()))

    @abstractmethod
    def go_on(self) -> None:
        """Send some more, if there is more to send."""

    def took(self, kind: int, call_id: int, header: bytes) -> None:
        """A frame of the target that isn't about the connection itself."""
        return

    def _frame(self, kind: int, call_id: int, header: bytes, payload: memoryview) -> None:
        if kind == Frame.ADMIT:
            self.admitted = True
        elif kind in (Frame.CLOSE, Frame.REFUSE):
            self.reason = _failures.decode(header).text
        else:
            self.took(kind, call_id, header)

    def _lost(self, reason: str) -> None:
        self.over = True
        if not self.fatal:
            self.tally.violated(f"a connection ended that had sent nothing wrong: {self.reason or reason}")

    def _unverified(self, reason: str) -> None:
        self.over = True
        self.tally.violated(f"the target's frames don't verify: {reason}")


def swarm(
    carrier: Callable[[PlainLoop], Carrier],
    address: str,
    secret: bytes,
    name: str,
    make: Callable[[Wire, SessionKeys], Attacker],
    tally: Tally,
    frames: int,
    judge: Callable[[Attacker], None] = lambda attacker: None,
) -> None:
    """Keep a few connections going until `tally` has `frames` and all of them have ended, which they must."""
    start = time.monotonic()
    loop = PlainLoop()
    opened = carrier(loop)
    settings = ConnectionSettings(Credentials(secret, identity(name)))
    attackers: dict[Attacker, float] = {}
    dialing = 0

    def connected(wire: Wire, keys: SessionKeys) -> None:
        nonlocal dialing
        dialing -= 1
        attackers[make(wire, keys)] = loop.time()

    def failed(error: Exception) -> None:
        nonlocal dialing
        dialing -= 1
        tally.violated(f"a peer with the secret can't connect: {error}")

    def wanted() -> bool:
        return tally.frames < frames and tally.n_violations < _ENOUGH_VIOLATIONS

    while wanted() or attackers or dialing:
        while len(attackers) + dialing < _PARALLEL and wanted():
            dialing += 1
            tally.connections += 1
            Dialing(opened, address, settings, connected, failed)
        loop.run_until(_once(), loop.time() + 0.01)
        now = loop.time()
        for attacker, since in list(attackers.items()):
            if attacker.admitted and not attacker.fatal and not attacker.over:
                attacker.go_on()
            if attacker.over:
                judge(attacker)
                attacker.wire.abandon()
                del attackers[attacker]
            elif now - since > _PATIENCE_S:
                tally.violated(f"not ended within {_PATIENCE_S:.0f} s after: {attacker.fatal or 'nothing wrong'}")
                attacker.wire.abandon()
                del attackers[attacker]
    opened.close()
    loop.close()
    tally.duration_s += time.monotonic() - start


def _once() -> Callable[[], bool]:
    """True at the second question: after one look at the descriptors."""
    asked = 0

    def done() -> bool:
        nonlocal asked
        asked += 1
        return asked > 1

    return done
