"""Which path two UCX workers share, and when a worker is released, without UCX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles_hpc.control import ucx_worker
from miles_hpc.control.plain_loop import PlainLoop
from miles_hpc.control.ucx_api import Path
from miles_hpc.control.ucx_worker import News, SharedPath, UcxWorker

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


AGREED, LEFT, OLD = News.AGREED, News.LEFT, News.OLD


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("1 1 1", [AGREED, AGREED, AGREED]),  # by several wires
        ("1 2", [AGREED, AGREED]),  # it moved before anything came over the path
        ("1 heard 1", [AGREED, AGREED]),
        ("1 heard 2", [AGREED, LEFT]),
        ("2 1", [AGREED, OLD]),  # 1 was overtaken
        ("2 heard 1 2", [AGREED, OLD, AGREED]),
        ("1 heard 2 anew 2", [AGREED, LEFT, AGREED]),
        ("1 heard 2 anew 1 2", [AGREED, LEFT, OLD, AGREED]),
        ("1 heard 3 anew 2 heard 3", [AGREED, LEFT, OLD, AGREED]),
    ],
)
def test_path_numbers(loop: PlainLoop, told: str, expected: list[News]) -> None:
    ours, _ = worker(loop)
    shared = ours.path_to(PEER)
    news = []
    for word in told.split():
        if word == "heard":
            shared.hear("peer")
        elif word == "anew":
            shared.leave("")
            shared = ours.path_to(PEER)
        else:
            news.append(shared.told(int(word)))
    assert news == expected


def test_numbers_count_up_and_are_compared_per_peer(loop: PlainLoop) -> None:
    ours, _ = worker(loop)
    one, other = ours.path_to(PEER), ours.path_to(OTHER)
    assert one.number < other.number
    assert one.told(100) is AGREED
    assert other.told(1) is AGREED


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
