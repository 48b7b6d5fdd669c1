"""Settings of all tests."""

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.exploring import FACTOR, examples

# A loaded machine, or the very first run of a fresh clone (hypothesis makes its table of characters then), is no fault.
settings.register_profile(
    "miles_hpc",
    max_examples=examples(100),
    derandomize=FACTOR == 0,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("miles_hpc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whichever test comes first starts a server, which may take minutes on a busy machine."""
    for item in items:
        if item.get_closest_marker("sglang") is not None:
            item.add_marker(pytest.mark.timeout(600))


def pytest_collection_finish() -> None:
    """What all test modules have made by now is there to stay: collections within tests needn't go through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Programs that a test runs in this process set handlers; what they ignore, later tests' children would too."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
