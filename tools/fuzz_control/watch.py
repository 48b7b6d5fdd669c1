"""What must stay as it is while a target is attacked: a good client's service, and the target's resources."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from miles_hpc.control.opening import open_blocking_transport
from miles_hpc.core.errors import MilesError
from miles_hpc.core.messages import EndSession
from miles_hpc.core.transport import BlockingEndpoint, Credentials
from tools.fuzz_control.target import identity

__all__ = ["GoodClient", "TargetProcess"]

_DEADLINE_S = 30.0
_INTERVAL_S = 0.05


class TargetProcess:
    """A target in a process of its own. Use as a context manager."""

    def __init__(self, kind: str, face: str, secret: bytes) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-control-")
        path = Path(self._folder.name) / "secret"
        path.touch(0o600)
        path.write_bytes(secret)
        command = [sys.executable, "-m", "tools.fuzz_control.target", "--kind", kind, "--face", face]
        self._process = subprocess.Popen(
            [*command, "--secret", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stray_lines = 0  # that a library prints
        self.most: dict[str, int] = {}
        # Read all the time: a library that prints much must not block the target on a full pipe.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.address = self._lines.get(timeout=60)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("{", "tcp://", "ucx://")):
                self._lines.put(line.strip())
            else:
                self.stray_lines += 1
        self._lines.put("")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str = "stats") -> dict[str, Any]:
        """What the target tells about itself. Raises RuntimeError when it has ended."""
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(what + "\n")
                self._process.stdin.flush()
                line = self._lines.get(timeout=_DEADLINE_S)
            except (OSError, queue.Empty):
                line = ""
        if not line:
            state = self._process.poll()
            raise RuntimeError("the target doesn't answer" if state is None else f"the target ended with code {state}")
        found: dict[str, Any]
        found, _ = json.JSONDecoder().raw_decode(line)  # UCX's own words may have come between it and the line's end
        for name in ("rss_bytes", "descriptors", "tasks", "timers", "half_open", "endpoints"):
            self.most[name] = max(self.most.get(name, 0), found[name])
        return found

    def settled(self, *, deadline_s: float = 15.0) -> dict[str, Any]:
        """As `ask`, when what was closed has gone: at most the good client's endpoint is left, or the time is over."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            found = self.ask()
            if found["half_open"] == 0 and found["endpoints"] <= 1:
                break
            time.sleep(0.1)
        time.sleep(1.5)  # longer than a goodbye may linger
        return self.ask("settle")

    def __enter__(self) -> TargetProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()


class GoodClient(threading.Thread):
    """Calls at intervals on an endpoint that must survive everything, and joins anew every now and then."""

    def __init__(self, kind: str, address: str, secret: bytes) -> None:
        super().__init__(name="good client")
        self._kind = kind
        self._address = address
        self._secret = secret
        self._over = threading.Event()
        self.paused = threading.Event()
        self.calls = 0
        self.joins = 0
        self.latencies_s: list[float] = []
        self.joins_s: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        transport = open_blocking_transport(self._kind, Credentials(self._secret, identity("good-client")), spin_s=0.0)
        try:
            endpoint = transport.connect(self._address, deadline_s=_DEADLINE_S)
            n = 0
            while not self._over.wait(_INTERVAL_S):
                n += 1
                self.latencies_s.append(self._call(endpoint, n))
                if n % 4 == 0 and not self.paused.is_set():
                    start = time.monotonic()
                    other = transport.connect(self._address, deadline_s=_DEADLINE_S)
                    self._call(other, -n)
                    other.close()
                    self.joins += 1
                    self.joins_s.append(time.monotonic() - start)
        except MilesError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        finally:
            transport.close()

    def _call(self, endpoint: BlockingEndpoint, n: int) -> float:
        message = EndSession(session_id=f"good-{n}")
        payload = n.to_bytes(8, "little", signed=True)
        start = time.monotonic()
        self.calls += 1
        reply = endpoint.call(message, payload=[payload], deadline_s=_DEADLINE_S)
        if reply.message != message or reply.payload != payload:
            self.failures.append(f"call {n} was answered by {reply.message}")
        return time.monotonic() - start

    def stop(self) -> None:
        self._over.set()
        self.join()
