"""A fuzzer for the control layer: `python -m tools.fuzz_control`."""
