"""Transports by name and the address to bind."""

from __future__ import annotations

import socket

import pytest

from miles_hpc.control.opening import local_address, open_blocking_transport, open_carrier, open_transport
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials, PeerIdentity

ME = Credentials(bytes(32), PeerIdentity(role="trainer", name="a", host="h", pid=1, attempt=1, term=1))


def test_transports_by_name() -> None:
    for kind in ("tcp", "loopback"):
        blocking = open_blocking_transport(kind, ME)
        assert blocking.chosen()["transport"] == kind
        blocking.close()
        assert open_carrier(kind).scheme == kind
    for opened in (open_carrier, lambda kind: open_transport(kind, ME), lambda kind: open_blocking_transport(kind, ME)):
        with pytest.raises(UserError, match="transport 'udp': expected tcp, ucx, mpi, loopback"):
            opened("udp")


def test_ucx_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ucxx", None)  # as if it weren't installed
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib.libucxx", None)
    with pytest.raises(UserError, match="install ucxx") as caught:
        open_transport("ucx", ME)
    assert "\n" not in str(caught.value)


def test_address_of_an_interface() -> None:
    assert local_address("lo") == "127.0.0.1"


def test_unknown_interface_names_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"interface 'nosuch0': .*this host has .*lo"):
        local_address("nosuch0")


def test_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert local_address() == "127.0.0.1"


def test_default_address_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind((local_address(), 0))
