"""The kinds and faces of the transport that the suites run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from miles_hpc.control.opening import open_carrier
from miles_hpc.core.errors import UserError
from tests.conformance.sglang_servers import end_servers

#: Elastic ones lose and admit peers while they run. Under mpi any loss means the next start.
ELASTIC_KINDS = ["loopback", "tcp", "tcp-only", "ucx"]
CORE_KINDS = [*ELASTIC_KINDS, pytest.param("mpi", marks=pytest.mark.mpi)]


@pytest.fixture(scope="session", autouse=True)
def sglang_servers() -> Iterator[None]:
    """Servers live as long as the session."""
    yield
    end_servers()


FACES = ["asyncio", "blocking"]


def _available(kind: str) -> str:
    try:
        open_carrier(kind)
    except UserError as error:
        pytest.skip(str(error))
    return kind


@pytest.fixture(params=CORE_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every kind of transport that can be opened here."""
    return _available(request.param)


@pytest.fixture(params=ELASTIC_KINDS)
def elastic_kind(request: pytest.FixtureRequest) -> str:
    """Every kind whose peers may come and go."""
    return _available(request.param)


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    """Of the listener."""
    return request.param


@pytest.fixture(params=FACES)
def dialer(request: pytest.FixtureRequest) -> str:
    """The face of the dialer."""
    return request.param
