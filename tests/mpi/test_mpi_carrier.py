"""The mpi carrier: its edges in a world of one rank, in this process, and real worlds of several under mpiexec."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from miles_hpc.control.auth import new_secret
from miles_hpc.control.blocking_face import PlainTransport
from miles_hpc.control.greeting import ConnectionSettings, Dialing
from miles_hpc.control.mpi_carrier import MpiCarrier, parse_address
from miles_hpc.control.mpi_pieces import PIECE_BYTES
from miles_hpc.control.mpi_wire import ENVELOPE, ENVELOPE_BYTES, MAGIC, Kind
from miles_hpc.control.mpi_world import LANES, MpiWorld, enter_world
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.core.errors import PeerLost, UserError
from miles_hpc.core.messages import Heartbeat, Shutdown
from miles_hpc.core.transport import BlockingEndpoint
from tests.conformance.transport_kinds import WAIT_S, AsyncServer, credentials, make, make_plain, plain_pair, run

MPIEXEC = Path(sys.executable).with_name("mpiexec")
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.mpi


@pytest.fixture
def world() -> Iterator[MpiWorld]:
    """The world of this process, which nothing of a test outlives."""
    pytest.importorskip("mpi4py")
    try:
        found = enter_world()
    except UserError as error:
        pytest.skip(str(error))
    gc.collect()
    found.reap()
    active, orphans = set(found.active), len(found.orphans)  # of tests before these, which may have been cut short
    yield found
    gc.collect()
    found.reap()
    gc.collect()
    assert not found.active - active
    assert len(found.orphans) <= orphans


def until(transport: PlainTransport, condition: Callable[[], bool]) -> None:
    assert transport.serve(condition, deadline_s=WAIT_S)


# -- a world of one rank ----------------------------------------------------------------------------------------------


def test_addresses() -> None:
    assert parse_address("mpi://0", 1) == (0, 0)
    assert parse_address("mpi://12.2049", 13) == (12, 2049)
    for wrong in ("mpi://13", "mpi://", "mpi://1.", "mpi://.1", "mpi://-1", "mpi://1.2.3", "mpi://x", "tcp://1:2", "1"):
        with pytest.raises(UserError, match="expected mpi://rank"):
            parse_address(wrong, 13)


def test_chosen_names_the_library(world: MpiWorld) -> None:
    transport = PlainTransport(partial(MpiCarrier, max_sleep_s=0.01), credentials("me"))
    chosen = transport.chosen()
    assert chosen["transport"] == "mpi" and chosen["size"] == "1" and chosen["rank"] == "0"
    assert "MPI" in chosen["library"] and chosen["max_sleep"] == "10 ms"
    assert chosen["threads"] in ("single", "funneled", "serialized", "multiple")
    transport.close()


def test_another_world_size_is_a_user_error(world: MpiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"MPI world of 1 ranks, expected 12: .*srun --mpi=pmi2") as caught:
        MpiCarrier(PlainLoop(), expected=12)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.delenv("PMI_SIZE", raising=False)
    with pytest.raises(UserError, match="expected 3"):
        enter_world()
    monkeypatch.setenv("PMI_SIZE", "1")  # the step's tasks start worlds of their own, and say so
    assert enter_world() is world


@pytest.mark.parametrize("n_header", [0, 4000, 5000, PIECE_BYTES + 3])
@pytest.mark.parametrize(
    "sizes", [(0,), (PIECE_BYTES - 1,), (PIECE_BYTES,), (PIECE_BYTES + 1,), (7, 3 * PIECE_BYTES, 1)]
)
def test_every_shape_of_a_large_frame(world: MpiWorld, n_header: int, sizes: tuple[int, ...]) -> None:
    payload = [bytes([n % 251]) * n for n in sizes]
    with plain_pair("mpi") as (dialer, accepted, _, _):
        sent = Shutdown(reason="x" * n_header)
        for endpoint in (dialer, dialer):
            pending = [endpoint.begin(sent, payload=payload, deadline_s=WAIT_S) for _ in range(2)]
            pending.append(endpoint.begin(Heartbeat(), deadline_s=WAIT_S))
            for call in pending[:2]:
                assert call.result().message == sent
                assert bytes(call.result().payload) == b"".join(payload)
            assert pending[2].result().message == Heartbeat()
        with pytest.raises(Exception, match="nobody handles"):
            accepted.call(sent, payload=payload, deadline_s=WAIT_S)


def test_a_dialer_may_be_early(world: MpiWorld) -> None:
    """The port's number is known before it's open: the connection waits for it."""
    early, late = make_plain("mpi", "early"), make_plain("mpi", "late")
    first = late.listen(lambda *_: None)
    rank, port = parse_address(first.address, 1)
    found: list[BlockingEndpoint] = []
    errors: list[Exception] = []

    def dial() -> None:
        transport = make_plain("mpi", "dialer")
        try:
            endpoint = transport.connect(f"mpi://{rank}.{port + LANES}", deadline_s=WAIT_S)
            endpoint.call(Heartbeat(), deadline_s=WAIT_S)
            found.append(endpoint)
        except Exception as error:
            errors.append(error)
        transport.close()

    thread = threading.Thread(target=dial)
    thread.start()
    late.serve(lambda: False, deadline_s=0.3)
    assert not found and not errors
    second = late.listen(lambda *_: None)
    assert parse_address(second.address, 1) == (rank, port + LANES)
    late.serve(lambda: bool(found or errors), deadline_s=WAIT_S)
    thread.join(WAIT_S)
    assert not errors, errors
    early.close()
    late.close()


def test_a_closed_port_refuses_while_its_process_looks(world: MpiWorld) -> None:
    with plain_pair("mpi") as (dialer, _, _, transport):
        second = transport.listen(lambda *_: None)
        second.close()
        with pytest.raises(PeerLost, match="that port is closed"):
            transport.connect(second.address, deadline_s=WAIT_S)
        dialer.call(Heartbeat(), deadline_s=WAIT_S)


def test_connects_that_were_given_up_leave_nothing(world: MpiWorld) -> None:
    with plain_pair("mpi") as (dialer, _, listener, transport):
        carrier = transport._carrier
        for turns in range(3):
            settings = ConnectionSettings(credentials("hasty"))
            dialing = Dialing(carrier, listener.address, settings, lambda *_: None, lambda _: None)
            for _ in range(turns):
                carrier.progress()
            dialing.give_up()
        until(transport, lambda: len(carrier._entries) == 2)
        dialer.call(Heartbeat(), deadline_s=WAIT_S)


def test_many_connections_between_the_same_ranks(world: MpiWorld) -> None:
    transport = make_plain("mpi", "both")
    listener = transport.listen(lambda endpoint, message, payload: (message, [payload]))
    endpoints = [transport.connect(listener.address, deadline_s=WAIT_S) for _ in range(50)]
    payloads = [bytes([n]) * (n * 12_345) for n in range(len(endpoints))]
    calls = [e.begin(Heartbeat(), payload=[p], deadline_s=WAIT_S) for e, p in zip(endpoints, payloads, strict=True)]
    assert [bytes(call.result().payload) for call in calls] == payloads
    transport.close()


@pytest.mark.parametrize("who", ["sender", "receiver", "both"])
def test_ends_in_the_middle_of_large_payloads_leave_nothing(world: MpiWorld, who: str) -> None:
    accepted: list[Any] = []
    transport: Any = make_plain("mpi", "both")
    listener = transport.listen(lambda endpoint, message, payload: (message, [payload]), on_connect=accepted.append)
    keeps = transport.connect(listener.address, deadline_s=WAIT_S)
    carrier = transport._carrier
    n_lost = 0
    for round in range(5):
        endpoint = transport.connect(listener.address, deadline_s=WAIT_S)
        payload = [bytes(40 * PIECE_BYTES)]
        pending = [endpoint.begin(Heartbeat(), payload=payload, deadline_s=WAIT_S) for _ in range(2)]
        transport.serve(lambda: False, deadline_s=0.002 * round)
        for end in {"sender": [endpoint], "receiver": [accepted[-1]], "both": [endpoint, accepted[-1]]}[who]:
            end.conversation.abandon("enough")
        for call in pending:
            try:
                call.result()
            except PeerLost:
                n_lost += 1
        keeps.call(Heartbeat(), payload=[bytes(5 * PIECE_BYTES)], deadline_s=WAIT_S)
        until(transport, lambda: len(carrier._entries) == 2 and not carrier.sending and not carrier.receiving)
    assert n_lost > 1
    transport.close()


def test_an_orderly_end_delivers_what_was_sent_before(world: MpiWorld) -> None:
    seen: list[int] = []
    with plain_pair("mpi", lambda endpoint, message, payload: seen.append(len(payload))) as (dialer, accepted, _, both):
        sizes = [20 * PIECE_BYTES, 0, 3 * PIECE_BYTES + 1, 5]
        for n in sizes:
            both._loop.call_soon(lambda n=n: dialer.conversation.notify(Heartbeat(), [bytes(n)]))
        both._loop.call_soon(lambda: dialer.conversation.close("that was all"))
        until(both, lambda: accepted.closed and len(seen) == len(sizes))
        assert seen == sizes
        assert accepted.close_reason == "closed by the peer: that was all"


def test_messages_of_others_are_dropped(world: MpiWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Other users of COMM_WORLD, garbage, and envelopes for connections that aren't there."""
    with plain_pair("mpi") as (dialer, _, listener, both):
        lane = parse_address(listener.address, 1)[1] % LANES
        number = dialer.conversation._wire.number  # type: ignore[attr-defined]
        strange = [
            b"",
            b"x",
            os.urandom(ENVELOPE.size),
            os.urandom(ENVELOPE_BYTES),
            os.urandom(ENVELOPE_BYTES + 1),
            os.urandom(1 << 20),
            ENVELOPE.pack(MAGIC, 99, number),
            ENVELOPE.pack(MAGIC, Kind.ACCEPT, number) + bytes(8),
            ENVELOPE.pack(MAGIC, Kind.REFUSE, number),
            ENVELOPE.pack(MAGIC, Kind.END, number),
            ENVELOPE.pack(MAGIC, Kind.CONNECT, lane) + b"short",
            ENVELOPE.pack(MAGIC, Kind.CONNECT, lane) + b"\xff" * 12,
            ENVELOPE.pack(MAGIC, Kind.DATA, 1 << 60) + bytes(100),
            ENVELOPE.pack(MAGIC, Kind.END, 1 << 60) + bytes(8),
        ]
        for data in strange * 3:
            request = world.comm.Isend([data, world.MPI.BYTE], 0, world.lane_tag(lane))
            until(both, request.Test)
            dialer.call(Heartbeat(), payload=[bytes(3 * PIECE_BYTES)], deadline_s=WAIT_S)
        assert "isn't ours" in caplog.text
        wire = dialer.conversation._wire  # type: ignore[attr-defined]
        for data in (b"\0" * 24, os.urandom(3000), b""):
            wire._put(data)  # bytes that no key has sealed
        with pytest.raises(PeerLost, match="frame of unknown kind"):
            dialer.call(Heartbeat(), deadline_s=WAIT_S)


def test_threads_have_carriers_of_their_own(world: MpiWorld) -> None:
    if world.threads != "multiple":
        pytest.skip(f"threads {world.threads}")
    with AsyncServer("mpi") as server:
        transport = make_plain("mpi", "dialer")
        endpoint = transport.connect(server.address, deadline_s=WAIT_S)
        for n in (0, 100, 100_000, 9 * PIECE_BYTES):
            assert len(endpoint.call(Heartbeat(), payload=[bytes(n)], deadline_s=WAIT_S).payload) == n
        transport.close()


def test_less_than_thread_multiple_is_for_the_main_thread(world: MpiWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "threads", "funneled")
    MpiCarrier(PlainLoop()).close()
    errors: list[UserError] = []

    def elsewhere() -> None:
        try:
            MpiCarrier(PlainLoop())
        except UserError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(WAIT_S)
    assert "started with threads 'funneled'" in str(errors[0])


def test_lanes_come_back(world: MpiWorld) -> None:
    """Closed, dropped, or stranded by a loop that was closed: a process may open any number of transports."""
    gc.collect()
    before = set(world._lanes)

    async def main() -> None:
        listener = await make("mpi", "listener").listen(lambda *_: None)
        endpoint = await make("mpi", "dialer").connect(listener.address, deadline_s=WAIT_S)
        await endpoint.call(Heartbeat(), deadline_s=WAIT_S)  # and nobody closes anything

    for _ in range(3):
        run(main)
        make_plain("mpi", "closed").close()
        make_plain("mpi", "dropped")
    world.reap()
    gc.collect()
    assert set(world._lanes) == before
    lanes = [world.take_lane() for _ in range(LANES - len(before))]
    with pytest.raises(UserError, match="transports are open in this process"):
        world.take_lane()
    for lane in lanes:
        world.free_lane(lane)


def test_an_idle_transport_is_not_polled(world: MpiWorld) -> None:
    async def main() -> None:
        transport = make("mpi", "listener")
        listener = await transport.listen(lambda *_: None)
        looks: list[int] = []
        carrier: Any = transport.carrier  # type: ignore[attr-defined]
        receive = carrier._receive
        carrier._receive = lambda: looks.append(1) or receive()
        await asyncio.sleep(0.1)
        assert looks
        await listener.close()
        looks.clear()
        await asyncio.sleep(0.1)
        assert not looks

    run(main)


# -- several ranks ----------------------------------------------------------------------------------------------------

HEAD = """
import asyncio, os, signal, sys, time
from functools import partial
from miles_hpc.control import mpi_world
from miles_hpc.control.blocking_face import PlainTransport
from miles_hpc.control.mpi_carrier import MpiCarrier
from miles_hpc.core.errors import DeadlineExpired, PeerLost
from miles_hpc.core.messages import Heartbeat, Shutdown
from miles_hpc.core.transport import Credentials, PeerIdentity

world = mpi_world.enter_world()
with open("/proc/self/maps") as maps, open(f"{sys.argv[2]}-{world.rank}", "w") as file:
    file.writelines(line.split()[-1] + "\\n" for line in maps if "/dev/shm/" in line)
rank = world.rank
identity = PeerIdentity(role="trainer", name=f"rank{rank}", host="host", pid=os.getpid(), attempt=1, term=1, rank=rank)
transport = PlainTransport(partial(MpiCarrier, expected=int(sys.argv[1])), Credentials(bytes(32), identity))
"""


def ranks(tmp_path: Path, n: int, program: str, *options: str, limit_s: float = 120.0) -> tuple[int, str, float]:
    """Run `program` on n ranks; `transport` is open in it. Returns exit code, output, duration.

    What ranks that end early leave in /dev/shm is removed.
    """
    if not MPIEXEC.exists():
        pytest.skip(f"{MPIEXEC} is missing: pip install mpi4py mpich")
    script = tmp_path / "program.py"
    script.write_text(HEAD + textwrap.dedent(program))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(MPIEXEC), *options, "-n", str(n), sys.executable, "-P", str(script), str(n), str(tmp_path / "shm")]
    start = time.monotonic()
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, env=environment, timeout=limit_s, check=False, **both)  # type: ignore[call-overload]
    finally:
        for file in tmp_path.glob("shm-*"):
            for left in file.read_text().split():
                Path(left).unlink(missing_ok=True)
    return done.returncode, done.stdout, time.monotonic() - start


@pytest.mark.parametrize("n", [2, 4])
def test_the_contract_between_ranks(tmp_path: Path, n: int) -> None:
    if not MPIEXEC.exists():
        pytest.skip(f"{MPIEXEC} is missing: pip install mpi4py mpich")
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(new_secret())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    program = ["-m", "tests.conformance.transport_program", "mpi", str(tmp_path)]
    command = [str(MPIEXEC), "-n", str(n), sys.executable, "-P", *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine ") == n


def test_skew_and_orderly_exits(tmp_path: Path) -> None:
    """Rank 1 calls before rank 0 listens, and its exit, without a close, is noticed at once."""
    code, output, _ = ranks(
        tmp_path,
        2,
        """
        if rank == 0:
            time.sleep(1)
            ended = []
            transport.listen(lambda *_: None, on_close=lambda e: ended.append(e.close_reason))
            assert transport.serve(lambda: bool(ended), deadline_s=60)
            print(ended)
        else:
            transport.connect("mpi://0", deadline_s=60).call(Heartbeat(), deadline_s=60)
        """,
    )
    assert code == 0, output
    assert "['endpoint closed: the peer has left']" in output


def test_a_rank_that_raises_is_noticed_before_the_world_ends(tmp_path: Path) -> None:
    code, output, took = ranks(
        tmp_path,
        2,
        """
        if rank == 0:
            ended = []
            transport.listen(lambda *_: None, on_close=lambda e: os.write(1, e.close_reason.encode()))
            transport.serve(lambda: False, deadline_s=60)
        else:
            endpoint = transport.connect("mpi://0", deadline_s=60)
            endpoint.call(Heartbeat(), deadline_s=60)
            raise ValueError("no such tensor")
        """,
    )
    assert code != 0
    assert "endpoint closed: the peer has left" in output and "no such tensor" in output, output
    assert took < 50, output


def test_nothing_hangs_on_a_silent_rank(tmp_path: Path) -> None:
    """A stopped rank takes part in nothing, like a dead one: deadlines fire, sends are abandoned, the exit is short."""
    _, output, took = ranks(
        tmp_path,
        2,
        """
        mpi_world.LEAVE_S = 1.0
        if rank == 0:
            transport.listen(lambda e, message, payload: (message, [payload]))
            transport.serve(lambda: False, deadline_s=0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        endpoint = transport.connect("mpi://0", deadline_s=60)
        endpoint.call(Heartbeat(), payload=[bytes(3 << 20)], deadline_s=60)
        time.sleep(1)
        for payload in ([], [bytes(64 << 20)], []):
            try:
                endpoint.call(Heartbeat(), payload=payload, deadline_s=0.5)
            except DeadlineExpired as error:
                print(error, flush=True)
        try:
            endpoint.notify(Heartbeat(), payload=[bytes(64 << 20)], deadline_s=0.5)
        except DeadlineExpired as error:
            print(error, flush=True)
        try:
            transport.connect("mpi://0", deadline_s=0.5)
        except DeadlineExpired as error:
            print(error, flush=True)
        start = time.monotonic()
        transport.close()
        print("closed in", round(time.monotonic() - start), "s", flush=True)
        """,
    )
    assert output.count("rank0: Heartbeat: nothing after 0.") == 3, output
    assert "rank0: Heartbeat: not taken after 0.5 s" in output
    assert "mpi://0: no connection after 0.5 s" in output
    assert "closed in 1 s" in output or "closed in 2 s" in output
    assert took < 60


def test_the_world_is_smaller_than_expected(tmp_path: Path) -> None:
    code, output, _ = ranks(
        tmp_path,
        2,
        """
        try:
            PlainTransport(partial(MpiCarrier, expected=5), Credentials(bytes(32), identity))
        except mpi_world.UserError as error:
            print(error)
        """,
    )
    assert code == 0, output
    assert output.count("MPI world of 2 ranks, expected 5") == 2
