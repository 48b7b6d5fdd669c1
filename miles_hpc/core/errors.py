"""The error tree. Every error says what failed, what was seen, what was expected and what to do.

MilesError
├── UserError            bad input: one line, exit code 2, nothing written
├── DeadlineExpired      a wait ended: names the peer, the message and the elapsed time
├── PeerLost             an endpoint closed or was declared lost
├── RemoteError          a handler on the other side raised; carries its text
├── AuthenticationError  a peer didn't prove that it knows the run's secret
├── FencedError          this process belongs to an older term or incarnation: it must end itself
├── IntegrityError       bytes don't match their digest, CRC or manifest
└── ProtocolError        a message that the contract doesn't allow here
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "DeadlineExpired",
    "FencedError",
    "IntegrityError",
    "MilesError",
    "PeerLost",
    "ProtocolError",
    "RemoteError",
    "UserError",
]


class MilesError(Exception):
    """Root of everything that this project raises on purpose."""


class UserError(MilesError):
    """Bad input. The text is one line: what failed, what was seen, what was expected, what to do."""


class DeadlineExpired(MilesError):
    """A wait ran out. The text names the peer, the message or event waited for, and the elapsed seconds."""


class PeerLost(MilesError):
    """The peer's endpoint closed, or the roster declared it lost; the text carries the evidence."""


class RemoteError(MilesError):
    """A handler on the other side raised.

    `kind` is the remote exception's class name, so that a caller can tell a FencedError from a bug.
    """

    def __init__(self, text: str, *, kind: str = "", peer: str = "") -> None:
        super().__init__(f"{peer}: {kind}: {text}" if peer else f"{kind}: {text}")
        self.kind = kind
        self.peer = peer
        self.text = text


class AuthenticationError(MilesError):
    """The peer didn't prove knowledge of the run's secret, or speaks another protocol version."""


class FencedError(MilesError):
    """A newer term or incarnation exists; whoever gets this stops and publishes nothing."""


class IntegrityError(MilesError):
    """Bytes at rest or in flight don't match the digest that was announced for them."""


class ProtocolError(MilesError):
    """A message arrived that the contract doesn't allow in this state."""
