"""The trainer role: one rank of a lock-step world that does what the controller asks of rank 0.

    rank 0   link thread:  controller, engines (link.py)
             main thread:  inbox ─▶ check ─▶ broadcast order ─┐
    rank r   main thread:          receive order ◀────────────┤
                                                              ▼
    all ranks:                     execute (commands.py) ─▶ rank 0 answers

| order | executed by all ranks as |
|---|---|
| message | the command of that message |
| poll | one look at the oldest save; rank 0 reports it when every rank is done |
| stop | finish saves, leave the process groups, exit 0 |

Tensors move through torch.distributed, orders through MPI. Any exception on any rank ends the world with a non-zero
code (failures.py): a half-done step is never continued; the supervisor starts the world anew from a checkpoint.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal

import msgspec

from miles_hpc.control.addresses import interface_names, local_address
from miles_hpc.control.mpi import SpmdGroup
from miles_hpc.core import exits
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import FencedError, MilesError, ProtocolError
from miles_hpc.core.messages import Message, decode, encode
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.registry import resolve
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import PeerIdentity
from miles_hpc.trainer.backend import TrainBackend
from miles_hpc.trainer.commands import Answer, Commands, SavePart
from miles_hpc.trainer.failures import Failure, FailureBoard, is_consequence
from miles_hpc.trainer.link import ControllerLink, Ended, Request
from miles_hpc.weights.broadcast import WeightSource

__all__ = ["RANK0_NAME", "run_trainer"]

#: The endpoint's name by which the controller knows rank 0.
RANK0_NAME = "trainer-rank0"
_SAVE_POLL_S = 0.2
_CAUSE_S = 1.0  # how long a consequence waits for its cause to be posted
_REPORT_S = 5.0


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["message", "poll", "stop"]
    message: bytes = b""
    payload: bytes = b""


def run_trainer(
    group: SpmdGroup,
    run: RunConfig,
    site: SiteConfig,
    paths: RunPaths,
    secret: bytes,
    *,
    attempt: int,
    incarnation: int,
    host: str = "",
) -> int:
    """Be one rank until the controller or the lease ends it; returns the exit code.

    Raises UserError for bad input that is found while the model is built, before anybody was contacted.
    """
    import torch
    import torch.distributed as dist

    interface = run.control.interface or site.interface
    # Gloo looks the host's name up by itself when it isn't told, and Debian's names resolve to 127.0.1.1.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_names(interface)[0])
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", ",".join(interface_names(interface)))
    torch.set_num_threads(run.train.threads)
    limit = timedelta(seconds=run.control.start_deadline_s)
    server: dist.TCPStore | None = None
    if group.rank == 0:
        server = dist.TCPStore(
            local_address(interface), 0, group.size, is_master=True, wait_for_workers=False, timeout=limit
        )
    address = msgspec.json.encode((server.host, server.port)) if server is not None else None
    store_host, store_port = msgspec.json.decode(group.broadcast(address), type=tuple[str, int])

    def connect() -> dist.TCPStore:
        return dist.TCPStore(store_host, store_port, group.size, is_master=False, timeout=limit)

    backend: TrainBackend = resolve("backend", run.train.backend)(
        run,
        paths.root,
        store=connect(),
        rank=group.rank,
        world_size=group.size,
        local_rank=_local_rank(group),
        timeout_s=run.control.step_deadline_s,
    )
    board = FailureBoard(connect())
    if group.rank != 0:
        return _follow(group, Commands(backend, paths, world_size=group.size, rank=group.rank), backend, board)

    def identity(term: int) -> PeerIdentity:
        return PeerIdentity(
            role="trainer",
            name=RANK0_NAME,
            host=host or socket.gethostname(),
            pid=os.getpid(),
            attempt=attempt,
            term=term,
            incarnation=incarnation,
        )

    events = EventLog(paths.events, RANK0_NAME, attempt=attempt)
    source = WeightSource()
    link = ControllerLink(
        run.control, paths, secret, identity, source.handle, interface=interface, failures=FailureBoard(connect())
    )
    link.start()
    commands = Commands(backend, paths, world_size=group.size, stage=source.stage, source=link.source_address)
    try:
        return _Lead(group, commands, backend, board, link, events).run()
    finally:
        link.close()
        events.close()


def _local_rank(group: SpmdGroup) -> int:
    """This rank's number among those of the same host, whatever started them."""
    gathered = group.gather_outcomes(socket.gethostname().encode())
    hosts = msgspec.json.decode(
        group.broadcast(None if gathered is None else msgspec.json.encode([h.decode() for h in gathered])),
        type=list[str],
    )
    return hosts[: group.rank].count(hosts[group.rank])


# ---------------------------------------------------------------------------------------------- every rank


def _execute(group: SpmdGroup, commands: Commands, message: Message, payload: memoryview) -> Answer:
    """One command on every rank; rank 0 returns when all ranks are through."""
    answer = commands.execute(message, payload)
    group.gather_outcomes(b"", deadline_s=getattr(message, "deadline_s", None))
    return answer


def _poll(group: SpmdGroup, commands: Commands) -> Any:
    """One look at the oldest save, by all ranks; a CheckpointWritten on every rank when it is over."""
    gathered = group.gather_outcomes(msgspec.json.encode(commands.poll_save()))
    joined = None if gathered is None else b"[" + b",".join(gathered) + b"]"
    parts = msgspec.json.decode(group.broadcast(joined), type=list[SavePart])
    return commands.settle_save(parts)


def _post(board: FailureBoard, error: BaseException, rank: int) -> None:
    """Make the error known, after its cause on another rank if it has one, and print it."""
    if is_consequence(error):
        end = time.monotonic() + _CAUSE_S
        while time.monotonic() < end and board.read() is None:
            time.sleep(0.05)
    failure = Failure.of(error, rank)
    print(f"trainer rank {rank}: {failure.details}", file=sys.stderr, flush=True)
    board.post(failure)


# ---------------------------------------------------------------------------------------------- ranks above 0


def _follow(group: SpmdGroup, commands: Commands, backend: TrainBackend, board: FailureBoard) -> int:
    try:
        while True:
            order = msgspec.msgpack.decode(group.broadcast(None), type=_Order)
            if order.kind == "stop":
                backend.close()
                return exits.DONE
            if order.kind == "poll":
                _poll(group, commands)
            else:
                _execute(group, commands, decode(order.message), memoryview(order.payload))
    except Exception as error:
        try:
            _post(board, error, group.rank)
            board.wait_reported(_REPORT_S)
        except RuntimeError:
            pass  # the store is gone, and rank 0 with it
        return exits.FAILED


# ---------------------------------------------------------------------------------------------- rank 0


class _Lead:
    """Rank 0's main loop."""

    def __init__(
        self,
        group: SpmdGroup,
        commands: Commands,
        backend: TrainBackend,
        board: FailureBoard,
        link: ControllerLink,
        events: EventLog,
    ) -> None:
        self._group = group
        self._commands = commands
        self._backend = backend
        self._board = board
        self._link = link
        self._events = events

    def run(self) -> int:
        """Serve until `Ended`, or until a rank fails; returns the exit code."""
        try:
            while True:
                try:
                    item = self._link.inbox.get(timeout=_SAVE_POLL_S if self._commands.saving else None)
                except queue.Empty:
                    self._poll_save()
                    continue
                if isinstance(item, Ended):
                    return self._end(item)
                self._serve(item)
                if self._commands.saving:
                    self._poll_save()
        except Exception as error:
            _post(self._board, error, 0)
            self._wait_told()
            return exits.FAILED

    def _serve(self, request: Request) -> None:
        """Answer one request: from memory, with a refusal, or by an order to all ranks."""
        if request.term < self._link.term:
            self._link.fail(request, FencedError(f"term {request.term} is over: term {self._link.term} leads"))
            return
        try:
            answer = self._commands.check(request.message, request.payload)
        except ProtocolError as refusal:
            self._link.fail(request, refusal)
            return
        if answer is None:
            payload = bytes(request.payload)
            self._order(_Order(kind="message", message=encode(request.message), payload=payload))
            with self._span(request):
                answer = _execute(self._group, self._commands, request.message, memoryview(payload))
        self._link.answer(request, answer)

    def _poll_save(self) -> None:
        self._order(_Order(kind="poll"))
        written = _poll(self._group, self._commands)
        if written is not None:
            self._link.report(written)

    def _end(self, ended: Ended) -> int:
        """A shutdown, or a loss that ends this world in order: saves under way are finished."""
        if ended.exit_code != exits.DONE:
            print(f"trainer rank 0: {ended.reason}", file=sys.stderr, flush=True)
            if self._board.read() is not None:
                return ended.exit_code  # a rank is gone: nothing collective can be done
        self._order(_Order(kind="stop"))
        self._backend.close()
        return ended.exit_code

    def _order(self, order: _Order) -> None:
        self._group.broadcast(msgspec.msgpack.encode(order))

    def _wait_told(self) -> None:
        """Until the link has passed the failure on, or for a moment."""
        end = time.monotonic() + _REPORT_S
        while time.monotonic() < end:
            try:
                item = self._link.inbox.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(item, Ended):
                return
            self._link.fail(item, MilesError("the trainer world has failed and ends"))

    def _span(self, request: Request) -> AbstractContextManager[None]:
        """An event span of the command, under the term that gave it."""
        self._events.term = request.term
        step = getattr(request.message, "step", None)
        return self._events.span(_snake(request.message), **({} if step is None else {"step": step}))


def _snake(message: Message) -> str:
    name = type(message).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
