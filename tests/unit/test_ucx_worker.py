"""Which path two UCX workers share, and when a worker is released, without UCX."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.control import ucx_worker
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.ucx_api import Path
from miles_hpc.control.ucx_worker import News, SharedPath, UcxWorker, agree_on_path
from tests.exploring import examples

PEER, OTHER = b"peer's worker", b"another worker"


class Quiet:
    """As much of UcxApi as a worker without wires uses."""

    def __init__(self) -> None:
        self.closed = False

    def progress(self) -> bool:
        return False

    def connect(self, address: bytes, failed: Callable[[str], None]) -> Path:
        class Endpoint:
            busy = False

            def handle(self) -> int:
                return 0

            def close(self) -> None:
                return

        return Endpoint()  # type: ignore[return-value]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def nothing_unreleased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_worker, "_unreleased", [])
    monkeypatch.setattr(ucx_worker, "lanes", lambda _: [])


@pytest.fixture
def loop() -> Iterator[PlainLoop]:
    loop = PlainLoop()
    yield loop
    loop.close()


def worker(loop: PlainLoop) -> tuple[UcxWorker, Quiet]:
    api = Quiet()
    made: Any = UcxWorker(loop, lambda: api)  # type: ignore[arg-type, return-value]
    assert made.api is api
    return made, api


AGREED, HEARD, LEFT, OLD = News.AGREED, News.HEARD, News.LEFT, News.OLD


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("11+1 11+1", [AGREED, AGREED]),  # by several wires
        ("11 11+1 11", [HEARD, AGREED, HEARD]),  # before and after it knew ours
        ("11 12 12+1", [HEARD, HEARD, AGREED]),  # it moved before it knew
        ("11+1 12", [AGREED, LEFT]),
        ("12 11", [HEARD, OLD]),  # 11 was overtaken
        ("12+1 11+1 12+1", [AGREED, OLD, AGREED]),
        ("11+1 12 anew 12 12+2", [AGREED, LEFT, HEARD, AGREED]),
        ("11+1 12 anew 11 12", [AGREED, LEFT, OLD, HEARD]),
        ("11+1 13 anew 12 13", [AGREED, LEFT, OLD, HEARD]),
        ("11+1 anew 11+1 12", [AGREED, OLD, HEARD]),  # we left, and the peer didn't know yet
        ("anew 11+1 12+2", [OLD, AGREED]),  # the same, and we had never heard of its path
    ],
)
def test_path_numbers(loop: PlainLoop, told: str, expected: list[News]) -> None:
    """`11+1`: the peer takes its path 11, which goes with our path 1."""
    ours, _ = worker(loop)
    shared = ours.path_to(PEER)
    news = []
    for word in told.split():
        if word == "anew":
            shared.leave("")
            shared = ours.path_to(PEER)
        else:
            number, _, goes_with = word.partition("+")
            news.append(shared.told(int(number), int(goes_with or 0)))
    assert news == expected


class End:
    """One end of a connection: as much of a wire as takes part in choosing a path."""

    def __init__(self, own: UcxWorker, peer: bytes) -> None:
        self.own, self.peer = own, peer
        self.shared: SharedPath | None = None
        self.agreed: SharedPath | None = None
        self.told = (0, 0)
        self.failed = ""
        self.line: deque[tuple[int, int]] = deque()  # towards us

    def start(self, other: End) -> None:
        self.other = other
        self.take_path(self.peer)

    @property
    def is_new(self) -> bool:
        return self.agreed is None

    def take_path(self, address: bytes) -> None:
        self.shared = self.own.path_to(address)
        self.shared.wires.add(self)
        self.tell_numbers()

    def tell_numbers(self) -> None:
        if self.shared is not None and self.told != self.shared.numbers:
            self.told = self.shared.numbers
            self.other.line.append(self.told)

    def read(self) -> None:
        """The next that came over the line."""
        if self.line and self.shared is not None:
            self.agreed = agree_on_path(self, self.line.popleft()) or self.agreed

    def fail(self, reason: str) -> None:
        self.end()
        self.failed = reason

    def end(self, *, unanswered: bool = False) -> None:
        if self.shared is not None:
            if unanswered and len(self.shared.wires) == 1:
                self.shared.wires.clear()
                self.shared.leave("")
            self.shared.wires.discard(self)
            self.shared = None


@settings(max_examples=examples(1000))
@given(
    st.lists(
        st.one_of(
            st.just(("open", 0, 0)),
            st.tuples(st.just("read"), st.integers(0, 2), st.integers(0, 1)),
            st.tuples(st.sampled_from(["end", "unanswered"]), st.integers(0, 2), st.integers(0, 1)),
        ),
        min_size=3,
        max_size=20,
    ),
    st.lists(st.integers(0, 7), max_size=30),
)
def test_a_connection_without_faults_comes_about_whatever_happened_to_those_before(
    events: list[tuple[str, int, int]], order: list[int]
) -> None:
    """Lines are read in any order, ends leave paths without the other's knowing it; then a link that works."""
    loop = PlainLoop()
    workers = [worker(loop)[0], worker(loop)[0]]
    connections: list[tuple[End, End]] = []

    def connect() -> tuple[End, End]:
        ends = End(workers[0], b"1"), End(workers[1], b"0")
        ends[0].start(ends[1])
        ends[1].start(ends[0])
        connections.append(ends)
        return ends

    for what, which, side in events:
        if what == "open":
            if len(connections) < 3:
                connect()
        elif which < len(connections):
            end = connections[which][side]
            if what == "read":
                end.read()
            else:
                end.end(unanswered=what == "unanswered")
    for ends in connections:  # the other side learns of an end
        for end, other in (ends, ends[::-1]):
            if end.shared is None and other.shared is not None:
                other.end(unanswered=bool(other.failed))
    last = connect()
    for step in [*order, *list(range(2 * len(connections))) * 10]:
        if step < 2 * len(connections):
            connections[step // 2][step % 2].read()
    assert not any(end.line and end.shared for ends in connections for end in ends)
    assert [end.failed for end in last] == ["", ""]
    assert all(end.agreed is end.shared is not None for end in last)
    one, two = (end.agreed for end in last)
    assert one is not None and two is not None
    assert (one.number, two.number) == (two.peer_number, one.peer_number)
    loop.close()


def test_numbers_count_up_and_are_compared_per_peer(loop: PlainLoop) -> None:
    ours, _ = worker(loop)
    one, other = ours.path_to(PEER), ours.path_to(OTHER)
    assert one.number < other.number
    assert one.told(100, 0) is HEARD
    assert other.told(1, 0) is HEARD


def test_a_worker_that_still_sends_is_released_when_another_one_is_opened_or_closed(loop: PlainLoop) -> None:
    for later in ("opened", "closed"):
        busy, api = worker(loop)
        another, _ = worker(loop)
        path: SharedPath = busy.path_to(PEER)
        path.unheard = True
        busy.close()
        assert not api.closed
        path.unheard = False
        if later == "opened":
            worker(loop)
        else:
            another.close()
        assert api.closed


def test_a_worker_of_another_thread_is_left_alone(loop: PlainLoop) -> None:
    busy, api = worker(loop)
    path = busy.path_to(PEER)
    path.unheard = True
    busy.close()
    path.unheard = False
    elsewhere = threading.Thread(target=lambda: worker(loop)[0].close())
    elsewhere.start()
    elsewhere.join()
    assert not api.closed
