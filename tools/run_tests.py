"""Run the tests that need no GPU in three processes at once: those that start Slurm or MPI, unit tests, all others.

    python -m tools.run_tests [PYTEST OPTION ...]

The first kind waits much: for time limits, for leases, for processes that start; so do many of the others. Unit tests'
output is shown while they run, that of the others when they are through. Exit code: the worst one.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_ALL = "not gpu and not netns and not lifecycle and not sglang"
_CLUSTER = "(slurm or mpi)"
_NO_TESTS = 5  # pytest's ExitCode.NO_TESTS_COLLECTED


_TESTS = Path(__file__).parents[1] / "tests"


def kinds() -> list[list[str]]:
    """Options of each process; every test that needs no GPU is in exactly one of them."""
    folders = [path for path in sorted(_TESTS.iterdir()) if path.is_dir() and path.name != "unit"]
    rest = f"not {_CLUSTER} and {_ALL}"
    return [
        ["-m", rest, *(f"--ignore={path}" for path in folders)],
        ["-m", rest, f"--ignore={_TESTS / 'unit'}"],
        ["-m", f"{_CLUSTER} and {_ALL}"],
    ]


def main(options: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", *options]
    # An interrupt at the terminal reaches all, and each ends what it started; here they only have to be waited for.
    signal.signal(signal.SIGINT, lambda *_: None)
    shown, *quiet = kinds()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in quiet]
        later = [
            subprocess.Popen([*command, *kind], stdout=log, stderr=subprocess.STDOUT)
            for kind, log in zip(quiet, logs, strict=True)
        ]
        codes = [subprocess.run([*command, *shown], check=False).returncode, *(process.wait() for process in later)]
        for log in logs:
            log.seek(0)
            shutil.copyfileobj(log, sys.stdout.buffer)
        sys.stdout.flush()
    # An option may have left one of them without a test.
    return max((abs(code) for code in codes if code != _NO_TESTS), default=_NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
