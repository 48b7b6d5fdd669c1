"""Transports by name."""

from __future__ import annotations

import pytest

from miles_hpc.control.opening import open_blocking_transport, open_carrier, open_transport
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials, PeerIdentity

ME = Credentials(bytes(32), PeerIdentity(role="trainer", name="a", host="h", pid=1, attempt=1, term=1))


def test_transports_by_name() -> None:
    for kind, scheme in (("tcp", "tcp"), ("tcp-only", "tcp"), ("loopback", "loopback")):
        blocking = open_blocking_transport(kind, ME)
        assert blocking.chosen()["transport"] == scheme
        assert blocking.listen(lambda *_: None).address.startswith(f"{scheme}://")
        blocking.close()
    for opened in (open_carrier, lambda kind: open_transport(kind, ME), lambda kind: open_blocking_transport(kind, ME)):
        with pytest.raises(UserError, match="transport 'udp': expected tcp, tcp-only, ucx, mpi, loopback"):
            opened("udp")


def test_ucx_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ucxx", None)  # as if it weren't installed
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib.libucxx", None)
    with pytest.raises(UserError, match="install ucxx") as caught:
        open_transport("ucx", ME)
    assert "\n" not in str(caught.value)
