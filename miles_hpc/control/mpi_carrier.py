"""The carrier over one MPI world that spans all het groups, for sites that want MPI as the only transport.

    looks ─▶ messages on our lane ─▶ CONNECT ─▶ port ─▶ accepted(wire), ACCEPT back
          │                       └─▶ DATA, END ─▶ the wire of that number
          ├─▶ pieces of large frames ─▶ their wires
          └─▶ sends that have gone   ─▶ their wires go on

Addresses look like mpi://3 or mpi://3.1024: a rank, and the port there when it isn't 0, the first port of the
process's first transport. So ranks may call each other without a rendezvous: a connection to a port that isn't open yet
waits for it.

**Nothing here waits inside MPI.** All is Isend, Iprobe, Irecv and Test, so deadlines fire whatever the peer does. MPI
has no descriptor to sleep on: the loop looks (polling.py), eagerly for a while after each event and each call, then
with sleeps that grow up to `max_sleep_s`. README.md says what that costs.

**No receive from MPI_ANY_SOURCE:** messages are probed for and then received from their sender. With MPICH 5.0.2
(ch4:ucx) and ranks on several nodes, posted receives from any source stay incomplete for ever although their message
has been copied to the buffer: a program of 30 lines shows it at once, with thread level single as well.

**Loss.** A dead rank isn't noticed here: MPI says nothing, and what is sent to it stays for ever. `on_lost` comes from
an orderly end only: a connection that was closed, a process that ended by itself or by an exception. Everything else is
the roster's to say, by missed heartbeats, and then the whole world starts anew: in a world with a dead rank nothing can
be said about the transfers that it took part in. Start the step with srun --kill-on-bad-exit=1.

**Threads.** A carrier belongs to its loop's thread. With MPI_THREAD_MULTIPLE each thread may have carriers of its own;
with less, the main thread only, which is checked.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from miles_hpc.control.mpi_pieces import last_line
from miles_hpc.control.mpi_wire import ENVELOPE, ENVELOPE_BYTES, MAGIC, Kind, MpiWire
from miles_hpc.control.mpi_world import LANES, enter_world
from miles_hpc.control.polling import polling_of
from miles_hpc.control.wire import Carrier, Loop, Port, Wire
from miles_hpc.core.errors import PeerLost, UserError

__all__ = ["MAX_SLEEP_S", "MpiCarrier", "MpiPort", "parse_address"]

logger = logging.getLogger(__name__)

#: Longest sleep between two looks.
MAX_SLEEP_S = 0.002

_TURN_MESSAGES = 64  # taken per look, so that timers and other callbacks have their turn
_MAX_PARKED = 1024  # connections that wait for a port; beyond that the oldest is dropped
_DIALER = struct.Struct("<IQ")  # lane, number
_NUMBER = struct.Struct("<Q")
_NOT_OURS = "a message of %d bytes from rank %d isn't ours: who else uses COMM_WORLD?"


class _Dial:
    """A CONNECT that isn't answered yet."""

    __slots__ = ("address", "connected", "failed", "given_up", "lane", "rank")

    def __init__(
        self,
        address: str,
        rank: int,
        lane: int,
        connected: Callable[[Wire], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.address = address
        self.rank = rank
        self.lane = lane
        self.connected = connected
        self.failed = failed
        self.given_up = False


class MpiPort(Port):
    """A port of this carrier."""

    def __init__(self, carrier: MpiCarrier, number: int, accepted: Callable[[Wire], None]) -> None:
        self._carrier = carrier
        self.number = number
        self.accepted = accepted
        rank = carrier.world.rank
        self.address = f"mpi://{rank}.{number}" if number else f"mpi://{rank}"

    def close(self) -> None:
        self._carrier.forget_port(self)


class MpiCarrier(Carrier):
    """MPI on one loop.

    `expected`: the size that the world must have (see `enter_world`). `max_sleep_s`: longest sleep between two looks.
    Raises UserError when MPI can't be used.
    """

    scheme = "mpi"

    def __init__(self, loop: Loop, *, expected: int | None = None, max_sleep_s: float = MAX_SLEEP_S) -> None:
        self.world = world = enter_world(expected)
        world.reap()
        self.loop = loop
        self.sending: set[MpiWire] = set()  # have messages with MPI
        self.receiving: set[MpiWire] = set()  # wait for pieces
        self._polling = polling_of(loop)
        self._max_sleep_s = max_sleep_s
        self._lane = world.take_lane()
        self._entries: dict[int, MpiWire | _Dial] = {}
        self._ports: dict[int, MpiPort] = {}
        self._next_port = self._lane  # the numbers of a lane's ports are LANES apart
        self._parked: OrderedDict[tuple[int, int, int], int] = OrderedDict()  # rank, lane, number of a dialer -> port
        self._loose: deque[Any] = deque()  # requests of envelopes that belong to no wire
        self._status = world.MPI.Status()
        self._room = bytearray(ENVELOPE_BYTES)
        self._late: dict[int, deque[tuple[Any, bytearray, int]]] = {}  # by rank: messages that take their time
        self._progressing = False
        self._is_closed = False
        # Also when nobody closes it: an asyncio transport is just dropped.
        self._free_lane = weakref.finalize(self, world.free_lane, self._lane)

    # ------------------------------------------------------------------------------ connections

    def listen(self, bind: str, accepted: Callable[[Wire], None]) -> Port:
        """Open the next port. `bind` has no meaning here."""
        port = MpiPort(self, self._next_port, accepted)
        self._next_port += LANES
        self._ports[port.number] = port
        self._wake()
        for (rank, lane, number), wanted in list(self._parked.items()):
            if wanted == port.number:
                del self._parked[rank, lane, number]
                self.loop.call_soon(self._accept, port.number, rank, lane, number)
        return port

    def dial(
        self, address: str, connected: Callable[[Wire], None], failed: Callable[[Exception], None]
    ) -> Callable[[], None]:
        rank, port = parse_address(address, self.world.size)
        dial = _Dial(address, rank, port % LANES, connected, failed)
        number = self.world.next_number()
        self._entries[number] = dial
        self._send_loose(dial.rank, dial.lane, Kind.CONNECT, port, _DIALER.pack(self._lane, number))
        self._wake()

        def give_up() -> None:
            dial.given_up = True

        return give_up

    def chosen(self) -> dict[str, str]:
        world = self.world
        return {
            "transport": "mpi",
            "library": world.library,
            "size": str(world.size),
            "rank": str(world.rank),
            "threads": world.threads,
            "max_sleep": f"{1e3 * self._max_sleep_s:g} ms",
        }

    def forget(self, wire: MpiWire) -> None:
        """Both sides have ended it and nothing of it is with MPI."""
        self._entries.pop(wire.number, None)
        self.sending.discard(wire)
        self.receiving.discard(wire)
        self._rest_if_idle()

    def forget_port(self, port: MpiPort) -> None:
        self._ports.pop(port.number, None)
        self._rest_if_idle()

    # ------------------------------------------------------------------------------ looks

    def _wake(self) -> None:
        """There is something to look for."""
        self.world.active.add(self)
        self._polling.add_poller(self.progress, max_sleep_s=self._max_sleep_s)
        self._polling.hurry()

    def hurry(self) -> None:
        """Something was sent; an answer may come soon."""
        self._polling.hurry()

    def _rest_if_idle(self) -> None:
        if not self._entries and not self._ports and not self._loose:
            self._polling.remove_poller(self.progress)
            self.world.active.discard(self)
            if self._is_closed:
                self._free_lane()

    def progress(self) -> bool:
        if self._progressing or self.world.left:  # _progressing: in a callback that runs the loop
            return False
        self._progressing = True
        try:
            worked = self._receive()
            for wire in tuple(self.receiving):
                worked = wire.take_pieces() or worked
            for wire in tuple(self.sending):
                worked = wire.advance() or worked
            while self._loose and self.world.is_over(self._loose[0]):
                self._loose.popleft()
                self._rest_if_idle()
            return worked
        except self.world.MPI.Exception as error:  # not of one transfer: MPI itself is of no use any more
            logger.error("MPI: %s", error)
            for entry in list(self._entries.values()):
                if isinstance(entry, MpiWire):
                    entry.break_off(error)
            self._polling.remove_poller(self.progress)
            return False
        finally:
            self._progressing = False

    def _receive(self) -> bool:
        """Take what has come to our lane. What isn't here at once (a rendezvous) holds up its sender's later ones."""
        world, status, late = self.world, self._status, self._late
        probe, any_source, tag = world.comm.Iprobe, world.MPI.ANY_SOURCE, world.lane_tag(self._lane)
        taken = 0
        # MPICH's probe looks first and fetches then, so it's the second one that finds what came during a sleep.
        while taken < _TURN_MESSAGES and (probe(any_source, tag, status) or probe(any_source, tag, status)):
            rank, n_bytes = status.Get_source(), status.Get_count(world.MPI.BYTE)
            taken += 1
            if n_bytes > ENVELOPE_BYTES:
                logger.warning(_NOT_OURS, n_bytes, rank)
                world.discard(rank, tag)
                continue
            room = self._room
            request = world.comm.Irecv([room, n_bytes, world.MPI.BYTE], rank, tag)
            if rank in late or not self._deliver(rank, request, room, n_bytes):
                late.setdefault(rank, deque()).append((request, room, n_bytes))
                self._room = bytearray(ENVELOPE_BYTES)
        for rank in list(late):
            waiting = late[rank]
            while waiting and self._deliver(rank, *waiting[0]):
                waiting.popleft()
                taken += 1
            if not waiting:
                del late[rank]
        return taken > 0

    def _deliver(self, rank: int, request: Any, room: bytearray, n_bytes: int) -> bool:
        """Act on a message if it's here; whether it's off our hands."""
        try:
            if not request.Test():
                return False
        except self.world.MPI.Exception as error:
            logger.warning("a message of rank %d is lost: %s", rank, last_line(error))
        else:
            self._arrived(rank, memoryview(room)[:n_bytes])
        return True

    # ------------------------------------------------------------------------------ envelopes

    def _arrived(self, rank: int, data: memoryview) -> None:
        size = ENVELOPE.size
        magic, kind, number = ENVELOPE.unpack_from(data) if len(data) >= size else (b"", 0, 0)
        if magic != MAGIC:
            logger.warning(_NOT_OURS, len(data), rank)
            return
        rest = data[size:]
        entry = self._entries.get(number)
        if kind == Kind.DATA:
            if isinstance(entry, MpiWire) and entry.rank == rank:
                entry.arrived(rest)
        elif kind == Kind.CONNECT and len(rest) == _DIALER.size:
            lane, theirs = _DIALER.unpack(rest)
            if lane < LANES:
                self._accept(number, rank, lane, theirs)
        elif kind == Kind.END and len(rest) == _NUMBER.size:
            if isinstance(entry, MpiWire) and entry.rank == rank:
                entry.peer_left(*_NUMBER.unpack(rest))
        elif isinstance(entry, _Dial) and entry.rank == rank:
            self._answered(number, entry, kind, rest)

    def _accept(self, port_number: int, rank: int, lane: int, theirs: int) -> None:
        port = self._ports.get(port_number)
        if port is None:
            if port_number < self._next_port:
                self._send_loose(rank, lane, Kind.REFUSE, theirs, b"")
                return
            self._parked[rank, lane, theirs] = port_number
            if len(self._parked) > _MAX_PARKED:
                self._parked.popitem(last=False)
            return
        wire = MpiWire(self, self.world.next_number(), rank, lane, theirs)
        self._entries[wire.number] = wire
        self._send_loose(rank, lane, Kind.ACCEPT, theirs, _NUMBER.pack(wire.number))
        port.accepted(wire)

    def _answered(self, number: int, dial: _Dial, kind: int, rest: memoryview) -> None:
        if kind == Kind.ACCEPT and len(rest) == _NUMBER.size:
            wire = MpiWire(self, number, dial.rank, dial.lane, *_NUMBER.unpack(rest))
            self._entries[number] = wire
            if dial.given_up:
                wire.abandon()
            else:
                wire.remote = dial.address
                dial.connected(wire)
        elif kind == Kind.REFUSE:
            del self._entries[number]
            if not dial.given_up:
                dial.failed(PeerLost(f"{dial.address}: can't connect: that port is closed"))
            self._rest_if_idle()

    def _send_loose(self, rank: int, lane: int, kind: Kind, number: int, rest: bytes) -> None:
        data = ENVELOPE.pack(MAGIC, kind, number) + rest
        try:
            request = self.world.comm.Isend([data, self.world.MPI.BYTE], rank, self.world.lane_tag(lane))
        except self.world.MPI.Exception as error:  # what waits for an answer expires
            logger.warning("can't send to rank %d: %s", rank, last_line(error))
            return
        if not self.world.is_over(request):
            self._loose.append(request)

    # ------------------------------------------------------------------------------ the end

    @property
    def is_stranded(self) -> bool:
        """Whether nobody asks it any more: it was closed, or its loop was."""
        is_closed = getattr(self.loop, "is_closed", None)
        return self._is_closed or (is_closed is not None and bool(is_closed()))

    def abandon_all(self) -> None:
        """Close all ports and end all connections."""
        for port in list(self._ports.values()):
            port.close()
        for number, entry in list(self._entries.items()):
            if isinstance(entry, MpiWire):
                entry.abandon()
            else:
                del self._entries[number]
        self._rest_if_idle()

    def close(self) -> None:
        """End everything; what isn't over yet, the world brings to its end when there is occasion."""
        self._is_closed = True
        self.abandon_all()
        self._polling.remove_poller(self.progress)  # from now on `reap` asks, in whatever thread
        self.world.reap()


def parse_address(address: str, size: int) -> tuple[int, int]:
    """Rank and port of mpi://rank or mpi://rank.port. Raises UserError for another form or a rank not in the world."""
    rank, _, port = address.removeprefix("mpi://").partition(".")
    decimal = rank.isdecimal() and (port.isdecimal() or not (port or address.endswith(".")))
    if not address.startswith("mpi://") or not decimal or int(rank) >= size:
        raise UserError(f"address {address!r}: expected mpi://rank or mpi://rank.port with a rank below {size}")
    return int(rank), int(port or 0)
