"""Settings of all tests."""

import gc

from hypothesis import HealthCheck, settings

# A loaded machine, or the very first run of a fresh clone (hypothesis makes its table of characters then), is no fault.
settings.register_profile("miles_hpc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("miles_hpc")


def pytest_collection_finish() -> None:
    """What all test modules have made by now is there to stay: collections within tests needn't go through it."""
    gc.collect()
    gc.freeze()
