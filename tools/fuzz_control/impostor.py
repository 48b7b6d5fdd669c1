"""A stranger that listens: what a dialer makes of it when it has reached somebody else's port."""

from __future__ import annotations

import select
import socket
import time
from random import Random

from miles_hpc.control.auth import Acceptor
from miles_hpc.control.greeting import ConnectionSettings, Dialing
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.tcp import TcpCarrier
from miles_hpc.core.errors import MilesError
from miles_hpc.core.transport import Credentials
from tools.fuzz_control.mutate import changed
from tools.fuzz_control.sockets import message
from tools.fuzz_control.tally import Tally
from tools.fuzz_control.target import identity

__all__ = ["fuzz_dialers"]

_PATIENCE_S = 10.0


def fuzz_dialers(rng: Random, frames: int, secret: bytes, tally: Tally) -> None:
    """Whatever listens there: the dialer's owner is told once, by an error of ours, and nothing is left."""
    start = time.monotonic()
    credentials = Credentials(secret, identity("fuzz"))
    loop = PlainLoop()
    carrier = TcpCarrier(loop)
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.settimeout(_PATIENCE_S)
        for _ in range(frames):
            _one_dialer(rng, loop, carrier, port, credentials, tally)
    loop.close()
    tally.frames += frames
    tally.connections += frames
    tally.duration_s += time.monotonic() - start


def _one_dialer(
    rng: Random, loop: PlainLoop, carrier: TcpCarrier, port: socket.socket, credentials: Credentials, tally: Tally
) -> None:
    told: list[object] = []
    address = f"tcp://127.0.0.1:{port.getsockname()[1]}"
    dialing = Dialing(
        carrier, address, ConnectionSettings(credentials), lambda wire, keys: told.append(wire), told.append
    )
    sock, _ = port.accept()
    with sock:
        sock.settimeout(_PATIENCE_S)
        loop.run_until(lambda: dialing._state > 0 or bool(told), loop.time() + _PATIENCE_S)
        _pretend(rng, sock, loop, Acceptor(credentials))
    loop.run_until(lambda: bool(told), loop.time() + _PATIENCE_S)
    loop.run_until(lambda: True)
    if len(told) != 1 or not isinstance(told[0], MilesError):
        tally.violated(f"a dialer's owner was told {told}")
    if loop.busy:
        tally.violated("a dialer that has failed still watches a descriptor")


def _pretend(rng: Random, sock: socket.socket, loop: PlainLoop, acceptor: Acceptor) -> None:
    """Be a listener up to a broken message."""
    challenge = acceptor.challenge(sock.recv(4096)[2:])
    how = rng.randrange(6)
    if how == 0:
        words = rng.randbytes(rng.randrange(300))
    elif how == 1:
        words = message(changed(rng, challenge))
    elif how == 2:
        words = changed(rng, message(challenge))
    else:
        sock.sendall(message(challenge))
        answers = select.poll()
        answers.register(sock, select.POLLIN)
        loop.run_until(lambda: bool(answers.poll(0)), loop.time() + _PATIENCE_S)
        welcome, _ = acceptor.welcome(sock.recv(8192)[2:])
        if how == 3:
            words = message(changed(rng, welcome))
        elif how == 4:
            words = changed(rng, message(welcome))
        else:
            words = message(challenge)
    try:
        sock.sendall(words)
    except OSError:
        pass  # the dialer has hung up
