"""Run the tests that need no GPU in two processes at once: those that start Slurm or MPI, and all others.

    python -m tools.run_tests [PYTEST OPTION ...]

The first kind waits much: for time limits, for leases, for processes that start. The other kind is one process that
computes. On 2 cores (load average 2 to 7 from other programs) they took 432 and 492 s, together 495 s. The first kind's
output is shown when both are through. Exit code: the worse one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

__all__ = ["main"]

_ALL = "not gpu and not netns and not lifecycle and not sglang"
_CLUSTER = "(slurm or mpi)"
_NO_TESTS = 5  # pytest's ExitCode.NO_TESTS_COLLECTED


def main(options: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", *options, "-m"]
    # An interrupt at the terminal reaches both, and each ends what it started; here it only has to be waited for.
    signal.signal(signal.SIGINT, lambda *_: None)
    with tempfile.TemporaryFile() as log:
        cluster = subprocess.Popen([*command, f"{_CLUSTER} and {_ALL}"], stdout=log, stderr=subprocess.STDOUT)
        others = subprocess.Popen([*command, f"not {_CLUSTER} and {_ALL}"])
        codes = others.wait(), cluster.wait()
        log.seek(0)
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    # An option may have left one of them without a test.
    return max((abs(code) for code in codes if code != _NO_TESTS), default=_NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
