"""From a bare wire to an authenticated one: the handshake of `auth.py` over any carrier, on both sides.

    Greeter   port ─▶ wire ─▶ opening, challenge, proof, welcome ─▶ authenticated(wire, keys)
    Dialing   dial ─▶ wire ─▶ opening, challenge, proof, welcome ─▶ authenticated(wire, keys) | failed(error)

What isn't authenticated after HANDSHAKE_DEADLINE_S is dropped; of more than MAX_HALF_OPEN at once, the oldest. Nothing
leaves towards a stranger but the challenge. No text of the log contains what it sent, and of many refusals only the
number is logged, so that a stranger can't fill the disk.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import msgspec

from miles_hpc.control.auth import Acceptor, Dialer, SessionKeys
from miles_hpc.control.frames import Limits
from miles_hpc.control.wire import Carrier, Loop, TimerHandle, Wire
from miles_hpc.core.errors import AuthenticationError, FencedError, MilesError, PeerLost
from miles_hpc.core.transport import Credentials
from miles_hpc.core.version import PROTOCOL_VERSION

__all__ = ["ConnectionSettings", "Dialing", "Greeter"]

#: A connection that hasn't authenticated after so long is dropped.
HANDSHAKE_DEADLINE_S = 5.0
#: So many connections may be in their handshake at once; beyond that the oldest is dropped. Fewer where the process may
#: have few descriptors: strangers get at most a quarter of them, the run needs the others.
MAX_HALF_OPEN = 1024
#: So many refusals are logged one by one in each LOG_INTERVAL_S; of the others only their number.
MAX_LOGGED_REFUSALS = 20
LOG_INTERVAL_S = 60.0

_FLUSH_S = 1.0


class ConnectionSettings(msgspec.Struct, frozen=True):
    """What a process brings to every connection."""

    credentials: Credentials
    limits: Limits = Limits()
    version: int = PROTOCOL_VERSION

    @property
    def window(self) -> tuple[int, int]:
        return self.limits.window_messages, self.limits.window_bytes


class Greeter:
    """A listener's port and the connections in their handshake."""

    def __init__(
        self,
        loop: Loop,
        carrier: Carrier,
        bind: str,
        settings: ConnectionSettings,
        authenticated: Callable[[Wire, SessionKeys], None],
        *,
        any_term: bool,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._any_term = any_term
        self._authenticated = authenticated
        self._half_open: dict[_Welcome, None] = {}  # in order of arrival; until their last message has left
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._closed = False
        self._port = carrier.listen(bind, self._arrived)
        self.address = self._port.address
        self._log = _RefusalLog(loop, self.address)

    def close(self) -> None:
        """Take no more connections and drop those in their handshake."""
        self._closed = True
        self._port.close()
        for welcome in list(self._half_open):
            welcome.drop()
        self._log.close()

    def _arrived(self, wire: Wire) -> None:
        if self._closed:  # it was on its way in the loop
            wire.abandon()
            return
        limit = MAX_HALF_OPEN
        if self._descriptors != resource.RLIM_INFINITY:
            limit = min(limit, max(1, self._descriptors // 4))
        if len(self._half_open) >= limit:
            next(iter(self._half_open)).crowded_out()
        self._half_open[_Welcome(self, wire)] = None

    # For _Welcome, which is this class's other half.

    def _acceptor(self) -> Acceptor:
        settings = self._settings
        return Acceptor(settings.credentials, any_term=self._any_term, version=settings.version, window=settings.window)

    def _proven(self, welcome: _Welcome, wire: Wire, keys: SessionKeys) -> None:
        del self._half_open[welcome]
        self._authenticated(wire, keys)


class _RefusalLog:
    """Refused connections in the log: at most MAX_LOGGED_REFUSALS + 1 lines in each interval."""

    def __init__(self, loop: Loop, address: str) -> None:
        self._loop = loop
        self._address = address
        self._timer: TimerHandle | None = None  # of the interval that began with a refusal
        self._lines = 0
        self._unlogged = 0
        self._last = ("", "")

    def add(self, remote: str, why: str) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOG_INTERVAL_S, self._tell)
        if self._lines < MAX_LOGGED_REFUSALS:
            self._lines += 1
            _warn("%s: connection from %s refused: %s", self._address, remote, why)
        else:
            self._unlogged += 1
            self._last = remote, why

    def _tell(self) -> None:
        if self._unlogged:
            _warn("%s: %d more connections refused, last %s: %s", self._address, self._unlogged, *self._last)
        self._timer = None
        self._lines = self._unlogged = 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._tell()


def _warn(text: str, *args: object) -> None:
    import logging

    logging.getLogger(__name__).warning(text, *args)


class _Welcome:
    """One connection in its handshake, seen from the listener."""

    def __init__(self, greeter: Greeter, wire: Wire) -> None:
        self._greeter = greeter
        self._wire = wire
        self._acceptor = greeter._acceptor()
        self._challenged = False
        self._refused = False
        self._timer: TimerHandle = greeter._loop.call_later(
            HANDSHAKE_DEADLINE_S, self.refused, f"no handshake within {HANDSHAKE_DEADLINE_S} s"
        )
        wire.on_message = self._message
        wire.on_lost = self.refused
        wire.on_violated = self.refused

    def _message(self, data: bytes) -> None:
        acceptor = self._acceptor
        try:
            if not self._challenged:
                self._challenged = True
                self._wire.send_message(acceptor.challenge(data))
                keys = None
            else:
                message, keys = acceptor.welcome(data)
                self._wire.send_message(message)
        except MilesError as error:
            self.refused(str(error))
            return
        if acceptor.error is not None:
            self.refused(str(acceptor.error), flush_s=_FLUSH_S)
        elif keys is not None:
            self._timer.cancel()
            self._wire.silence()
            self._greeter._proven(self, self._wire, keys)

    def refused(self, why: str, *, flush_s: float = 0.0) -> None:
        self._greeter._log.add(self._wire.remote, why)
        if not flush_s:
            self.drop()
            return
        # It counts as half open until it's gone: else the refused could pile up without bound.
        self._refused = True
        self._timer.cancel()
        self._timer = self._greeter._loop.call_later(flush_s, self.drop)
        self._wire.close(flush_s)

    def crowded_out(self) -> None:
        if self._refused:
            self.drop()
        else:
            self.refused("too many connections in their handshake")

    def drop(self) -> None:
        self._greeter._half_open.pop(self, None)
        self._timer.cancel()
        self._wire.abandon()


class Dialing:
    """One connection attempt. Exactly one of the callbacks is called, unless it's given up before."""

    def __init__(
        self,
        carrier: Carrier,
        address: str,
        settings: ConnectionSettings,
        authenticated: Callable[[Wire, SessionKeys], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._address = address
        self._authenticated = authenticated
        self._failed = failed
        self._dialer = Dialer(settings.credentials, version=settings.version, window=settings.window)
        self._state = 0  # 1: opening sent, 2: proof sent, 3: over
        self._wire: Wire | None = None
        self._stop_dialing = carrier.dial(address, self._connected, self._fail)

    def give_up(self) -> None:
        """Stop; no callback follows."""
        self._state = 3
        if self._wire is None:
            self._stop_dialing()
        else:
            self._wire.abandon()

    def _connected(self, wire: Wire) -> None:
        self._wire = wire
        wire.on_message = self._message
        wire.on_lost = self._lost
        wire.on_violated = self._lost
        self._state = 1
        wire.send_message(self._dialer.opening())

    def _message(self, data: bytes) -> None:
        wire = self._wire
        assert wire is not None
        try:
            if self._state == 1:
                self._state = 2
                wire.send_message(self._dialer.proof(data))
                return
            keys = self._dialer.finish(data)
        except MilesError as error:
            self._fail(_with_address(error, self._address))
            return
        self._state = 3
        wire.silence()
        self._authenticated(wire, keys)

    def _lost(self, reason: str) -> None:
        if self._state == 2:
            self._fail(
                AuthenticationError(
                    f"{self._address}: hung up on our proof; its run has another secret, or the process just died"
                )
            )
        else:
            self._fail(PeerLost(f"{self._address}: closed in the handshake: {reason}"))

    def _fail(self, error: Exception) -> None:
        if self._state == 3:
            return
        self.give_up()
        self._failed(error)


def _with_address(error: MilesError, address: str) -> MilesError:
    if isinstance(error, AuthenticationError | FencedError | PeerLost):
        return type(error)(f"{address}: {error}")
    return error
