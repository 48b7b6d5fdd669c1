"""The Unix socket beside a TCP port: who is let through it, and when TCP is taken instead."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from miles_hpc.control import same_host
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.same_host import connect_on_host, listen_on_host, who_is_there
from miles_hpc.control.stream_wire import StreamWire
from miles_hpc.control.tcp import TcpCarrier, parse_address
from miles_hpc.control.wire import Port, Wire
from miles_hpc.core.errors import PeerLost

WAIT_S = 30.0


class Meeting:
    """A listening and a dialing carrier on one loop."""

    def __init__(self, *, listener: bool = True, dialer: bool = True, bind: str = "127.0.0.1") -> None:
        """Whether each of them goes by Unix sockets."""
        self.loop = PlainLoop()
        self.accepted: list[Wire] = []
        self._dialer = TcpCarrier(self.loop, same_host=dialer)
        self.port: Port = TcpCarrier(self.loop, same_host=listener).listen(bind, self.accepted.append)

    def dial(self) -> tuple[Wire, Wire]:
        """Both ends of a new connection."""
        connected: list[Wire] = []
        failed: list[Exception] = []
        before = len(self.accepted)
        self._dialer.dial(self.port.address, connected.append, failed.append)
        done = lambda: bool(failed) or (bool(connected) and len(self.accepted) > before)  # noqa: E731
        assert self.loop.run_until(done, self.loop.time() + WAIT_S)
        assert not failed, failed
        return connected[0], self.accepted[-1]

    def close(self) -> None:
        self.port.close()
        for wire in self.accepted:
            wire.abandon()
        self.loop.close()


@pytest.fixture
def meeting() -> Iterator[Callable[..., Meeting]]:
    made: list[Meeting] = []

    def make(**options: object) -> Meeting:
        made.append(Meeting(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


def is_unix(wire: Wire) -> bool:
    assert isinstance(wire, StreamWire)
    return wire._sock.family == socket.AF_UNIX


def address_of(meeting: Meeting) -> tuple[str, int]:
    host, port = parse_address(meeting.port.address)[1][:2]
    return host, port


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.0.0.2", "::1"])
def test_processes_of_one_host_meet_over_a_unix_socket(meeting: Callable[..., Meeting], bind: str) -> None:
    if bind == "::1":
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind((bind, 0))
            except OSError as error:
                pytest.skip(f"no IPv6 loopback here: {error}")
    m = meeting(bind=bind)
    ours, theirs = m.dial()
    assert is_unix(ours) and is_unix(theirs)
    assert theirs.remote == f"pid {os.getpid()} (user {os.geteuid()}) of this host"
    assert ours.remote == m.port.address


@pytest.mark.parametrize(("listener", "dialer"), [(False, True), (True, False), (False, False)])
def test_both_sides_must_want_it(meeting: Callable[..., Meeting], listener: bool, dialer: bool) -> None:
    ours, theirs = meeting(listener=listener, dialer=dialer).dial()
    assert not is_unix(ours) and not is_unix(theirs)
    assert theirs.remote == "127.0.0.1"


def test_a_port_that_is_closed_leaves_no_name(meeting: Callable[..., Meeting]) -> None:
    m = meeting()
    host, port = address_of(m)
    m.port.close()
    assert connect_on_host(host, port) is None


def test_ports_of_one_number_on_two_addresses_are_not_mixed_up() -> None:
    with closing(socket.create_server(("127.0.0.3", 0))) as reserved:
        port = reserved.getsockname()[1]
        one, other = listen_on_host("127.0.0.3", port), listen_on_host("127.0.0.4", port)
        assert one is not None and other is not None
        with one, other:
            ours = connect_on_host("127.0.0.4", port)
            assert ours is not None
            with ours:
                accepted, _ = other.accept()
                accepted.close()
                with pytest.raises(BlockingIOError):
                    one.accept()


def test_another_users_socket_of_that_name_is_left_for_tcp(
    meeting: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = meeting()
    monkeypatch.setattr(same_host.os, "geteuid", lambda: 4711)
    ours, _ = m.dial()
    assert not is_unix(ours)


def test_a_name_that_is_taken_keeps_the_listener_to_tcp(meeting: Callable[..., Meeting]) -> None:
    m = meeting()
    host, port = address_of(m)
    assert listen_on_host(host, port) is None


def test_a_full_queue_is_left_for_tcp() -> None:
    """A stopped listener's queue fills up: connect would wait for ever, or has no answer; TCP's has a deadline."""
    host, port = "127.0.0.5", 40_000
    beside = listen_on_host(host, port)
    assert beside is not None
    with beside:
        beside.listen(1)  # again, with a shorter queue
        held = []
        while (sock := connect_on_host(host, port)) is not None:
            held.append(sock)
            assert len(held) < 10
        for sock in held:
            sock.close()


@pytest.mark.parametrize("dialer", [True, False])
def test_a_dialer_without_a_descriptor_is_told_as_of_any_failure(
    meeting: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch, dialer: bool
) -> None:
    """Later, and not by an OSError: a member that connects again would end of it."""

    def none_left(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    m = meeting(dialer=dialer)
    failed: list[Exception] = []
    with monkeypatch.context() as full:
        full.setattr(socket, "socket", none_left)
        m._dialer.dial(m.port.address, lambda _: None, failed.append)
        m._dialer.dial(m.port.address, lambda _: None, failed.append)()  # given up at once
    assert failed == []
    m.loop.run_until(lambda: False, m.loop.time() + 0.01)
    assert [str(error) for error in failed] == [f"{m.port.address}: can't connect: Too many open files"]
    assert isinstance(failed[0], PeerLost)
    m.dial()


def test_who_is_there_when_nobody_is_left_is_said_without_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    assert who_is_there(ours) == f"pid {os.getpid()} (user {os.geteuid()}) of this host"
    ours.close()
    assert who_is_there(ours) == "this host"
