"""Listening on several addresses and dialing a peer that published several.

    listener   one listener per address of `local_addresses` ─▶ published together, the best one first
    dialer     networks that it is on itself first ─▶ one address after the other ─▶ the first that proves itself

A wrong host at the same private address doesn't know the run's secret, so the handshake decides; a wrong process of the
same run doesn't have the name that was asked for. Addresses are tried one at a time, because two connections of one
peer at a time would fence each other. An address that says nothing is given up after a few seconds in favour of the
next, and gets longer in the next round.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterator, Sequence

from miles_hpc.control.addresses import host_addresses
from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import AuthenticationError, DeadlineExpired, FencedError, MilesError, PeerLost, UserError
from miles_hpc.core.transport import Endpoint, Handler, Listener, Transport

__all__ = ["Listening", "connect_any", "dialing_order", "host_of", "join_addresses", "listen_on", "split_addresses"]

#: Seconds for an address of several in the first round; doubled in each further one.
FIRST_TRY_S = 2.0

EndpointHook = Callable[[Endpoint], Awaitable[None]]


class Listening:
    """Listeners of one service. `addresses` is what is published: one per address that could be bound."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)
        self.addresses = tuple(listener.address for listener in listeners)

    async def close(self) -> None:
        """As Listener.close, of all of them."""
        for listener in self._listeners:
            await listener.close()


async def listen_on(
    transport: Transport,
    handler: Handler,
    addresses: Sequence[str],
    *,
    on_connect: EndpointHook | None = None,
    on_close: EndpointHook | None = None,
    any_term: bool = False,
) -> Listening:
    """Listen on each of `addresses` (as `local_addresses` returns them) that can be bound; ports differ.

    Raises UserError when none can be.
    """
    listeners: list[Listener] = []
    refused: list[UserError] = []
    for bind in addresses:
        try:
            listeners.append(
                await transport.listen(handler, bind=bind, on_connect=on_connect, on_close=on_close, any_term=any_term)
            )
        except UserError as error:  # for example an IPv6 address that was withdrawn a moment ago
            refused.append(error)
    if not listeners:
        raise refused[0] if refused else UserError("no address to listen on; name an interface in the site file")
    return Listening(listeners)


async def connect_any(
    transport: Transport,
    addresses: Sequence[str],
    handler: Handler | None = None,
    *,
    deadline_s: float,
    name: str = "",
) -> Endpoint:
    """Connect to a service through whichever of its addresses leads to it; `name` is what the peer must be called.

    Raises as Transport.connect. FencedError ends the search: only a process of this run can say so. When every address
    refused at once, that is raised (AuthenticationError or PeerLost) without waiting for the deadline.
    """
    if not addresses:
        raise PeerLost(f"{name or 'a service'}: published without an address")
    deadline = Deadline(deadline_s, f"connecting to {name or 'a service'} at {join_addresses(addresses)}")
    refusals: dict[str, MilesError] = {}
    for address, limit_s in _tries(dialing_order(addresses), deadline):
        if address in refusals:
            continue
        try:
            endpoint = await transport.connect(address, handler, deadline_s=limit_s)
        except FencedError:
            raise
        except DeadlineExpired:
            continue
        except (AuthenticationError, PeerLost) as error:
            refusals[address] = error
        else:
            if not name or endpoint.peer.name == name:
                return endpoint
            refusals[address] = PeerLost(f"{address}: is {endpoint.peer.name}, not {name}")
            await endpoint.close("not who was looked for")
        if len(refusals) == len(set(addresses)):
            raise _worst(list(refusals.values()))
    raise deadline.error()


def dialing_order(addresses: Sequence[str], own: Sequence[str] | None = None) -> list[str]:
    """`addresses` with those first whose network this host is on; otherwise as they were published.

    `own` are this host's addresses with their prefix lengths, as 10.0.0.3/24; default: asked from the kernel.
    """
    if len(addresses) < 2:
        return list(addresses)
    given = [str(one.address) for one in host_addresses() if one.up] if own is None else own
    networks = [ipaddress.ip_interface(text).network for text in given]

    def attached(address: str) -> bool:
        try:
            ip = ipaddress.ip_address(host_of(address))
        except ValueError:
            return False
        return any(ip in network for network in networks)

    return sorted(dict.fromkeys(addresses), key=lambda address: not attached(address))


def host_of(address: str) -> str:
    """The host in an address of a transport: 10.0.0.3 of tcp://10.0.0.3:4000, fd00::3 of tcp://[fd00::3]:4000."""
    return address.rpartition("://")[2].rpartition(":")[0].strip("[]")


def join_addresses(addresses: Sequence[str]) -> str:
    """Several addresses of one service as one text, for messages that have room for one."""
    return ",".join(addresses)


def split_addresses(text: str) -> tuple[str, ...]:
    """Inverse of join_addresses."""
    return tuple(text.split(","))


def _tries(addresses: Sequence[str], deadline: Deadline) -> Iterator[tuple[str, float]]:
    """Address after address, round after round, each with its time limit, until the deadline."""
    limit_s = FIRST_TRY_S if len(addresses) > 1 else deadline.remaining_s
    while not deadline.expired:
        for address in addresses:
            if not deadline.expired:
                yield address, min(limit_s, deadline.remaining_s)
        limit_s *= 2.0


def _worst(errors: Sequence[MilesError]) -> MilesError:
    """What to report of several refusals: a stranger's answer tells more than a closed port."""
    for error in errors:
        if isinstance(error, AuthenticationError):
            return error
    return errors[0] if len(errors) == 1 else PeerLost("; ".join(str(error) for error in errors))
