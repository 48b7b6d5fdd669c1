"""Transports by name."""

from __future__ import annotations

import pytest

from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import UserError
from miles_hpc.core.transport import Credentials, PeerIdentity

ME = Credentials(bytes(32), PeerIdentity(role="trainer", name="a", host="h", pid=1, attempt=1, term=1))


def test_transports_by_name() -> None:
    assert type(open_transport("tcp", ME)).__name__ == "TcpTransport"
    assert type(open_transport("loopback", ME)).__name__ == "LoopbackTransport"
    with pytest.raises(UserError, match="transport 'mpi': expected tcp, ucx or loopback"):
        open_transport("mpi", ME)


def test_ucx_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ucxx", None)  # as if it weren't installed
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib.libucxx", None)
    with pytest.raises(UserError, match="install ucxx") as caught:
        open_transport("ucx", ME)
    assert "\n" not in str(caught.value)
