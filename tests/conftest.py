"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A loaded machine, or the very first run of a fresh clone (hypothesis makes its table of characters then), is no fault.
settings.register_profile("miles_hpc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("miles_hpc")
