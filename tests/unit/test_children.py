"""Child processes: their end is seen, their group is ended, and they don't outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.control.children import ChildProcess


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until_dead(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not _alive(pid)


def test_exit_codes_and_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = tmp_path / "log"
        child = ChildProcess("c", [sys.executable, "-c", "print('hello'); raise SystemExit(3)"], log=log)
        first, second = await asyncio.gather(child.wait(), child.wait())
        assert (first, second, child.exit_code) == (3, 3, 3)
        assert child.log_tail() == "hello\n"
        killed = ChildProcess("k", ["sleep", "60"], log=None)
        killed.kill()
        assert await killed.wait() == -signal.SIGKILL
        killed.signal(signal.SIGTERM)  # harmless after its end

    asyncio.run(scenario())


def test_end_terminates_then_kills_the_whole_group(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.sh"
    script.write_text("trap '' TERM\nsleep 60 &\necho $! > grandchild\nwhile :; do wait; done\n")

    async def scenario() -> int:
        child = ChildProcess("c", ["bash", "-c", f"cd {tmp_path} && exec bash stubborn.sh"], log=None)
        while not (tmp_path / "grandchild").exists() or not (tmp_path / "grandchild").read_text().strip():
            await asyncio.sleep(0.02)
        assert await child.end(grace_s=0.3) == -signal.SIGKILL
        return int((tmp_path / "grandchild").read_text())

    assert _until_dead(asyncio.run(scenario()))


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "from miles_hpc.control.children import ChildProcess\n"
        "import sys, time\n"
        "c = ChildProcess('c', ['sleep', '60'], log=None)\n"
        "print(c.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert _until_dead(pid)


def test_a_stopped_child_is_killed_and_a_running_one_is_not() -> None:
    async def scenario() -> None:
        child = ChildProcess("c", ["sleep", "60"], log=None)
        guard = asyncio.create_task(child.kill_when_stopped(0.3))
        await asyncio.sleep(0.8)
        assert child.exit_code is None and not child.stopped
        os.kill(child.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL
        await asyncio.wait_for(guard, 10)

    asyncio.run(scenario())


def test_what_a_child_left_behind_is_killed_when_it_has_ended(tmp_path: Path) -> None:
    """Workers of an engine that crashed would hold the GPU memory that the next engine needs."""
    left = tmp_path / "left"

    async def scenario(look: bool) -> int:
        child = ChildProcess("c", ["bash", "-c", f"sleep 60 & echo $! > {left}; exit 7"], log=None)
        if look:
            while child.exit_code is None:
                await asyncio.sleep(0.02)
        assert await child.wait() == 7
        return int(left.read_text())

    for look in (False, True):
        assert _until_dead(asyncio.run(scenario(look)))


def test_only_the_main_thread_starts_children() -> None:
    """The kernel's signal at a parent's death is one at the end of the thread that started the child."""

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="child 'c': started from thread 'asyncio_0', not the main"):
            await asyncio.to_thread(ChildProcess, "c", ["sleep", "60"], log=None)

    asyncio.run(scenario())
