"""How long N workers take to start: under srun with ours, bare srun of the same width, and Ray on the same nodes.

All start inside an allocation that exists already, as a batch job's steps do. Time runs from the start of the first
command until the last worker has answered a call; for bare srun until srun has ended. Ending is not timed.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_hpc.core.deadline import Deadline
from tools.bench_control.arm import Arm
from tools.bench_control.plan import BOX_NODES, Cell

_CLIENT_S = 30.0


class _Startup(Arm):
    """An allocation of `n_peers` tasks on all nodes of the box, from start to stop. There is no content to check."""

    _job = ""

    def start(self, n_peers: int) -> None:
        command = ["salloc", "--no-shell", f"-N{BOX_NODES}", f"-n{n_peers}", "--immediate=20", "-J", "bench"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_S, stdin=subprocess.DEVNULL)
        found = re.search(r"Granted job allocation (\d+)", done.stderr)
        if found is None:
            raise RuntimeError(f"salloc: {' '.join(done.stderr.split()) or done.returncode}")
        self._job = found[1]
        self._n = n_peers

    def srun(self, *command: str, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a step; its output goes to the arm's log."""
        options = options or (f"-N{BOX_NODES}", f"-n{self._n}")
        argv = ["srun", f"--jobid={self._job}", "--mpi=none", "--overlap", *options, *command]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def measure(self, cell: Cell) -> list[float]:
        samples = []
        for _ in range(cell.operations):
            start = time.perf_counter()
            finish = self.bring_up(cell.limit_s)
            samples.append(time.perf_counter() - start)
            finish()
        return samples

    def bring_up(self, limit_s: float) -> Callable[[], None]:
        """Start the workers; returns, when they are ready, what ends them."""
        raise NotImplementedError

    def close(self) -> None:
        if self._job:
            self.stop()

    def stop(self) -> None:
        subprocess.run(["scancel", "-f", self._job], timeout=_CLIENT_S, stdin=subprocess.DEVNULL)
        deadline = Deadline(_CLIENT_S, f"job {self._job} to end")
        while subprocess.run(
            ["squeue", "-h", "-j", self._job, "-o", "%i"], capture_output=True, timeout=_CLIENT_S
        ).stdout.strip():
            deadline.check()
            time.sleep(0.1)
        self._job = ""

    def check(self, cell: Cell) -> None:
        pass

    def operation(self, cell: Cell) -> Callable[[], object]:
        raise NotImplementedError("timed by measure")

    def echo(self, peer: int, data: bytes) -> bytes:
        raise NotImplementedError("workers carry no content")

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        raise NotImplementedError("workers carry no content")


class Srun(_Startup):
    """`srun true`, or `srun python -c pass`."""

    def __init__(self, folder: Path, cores: list[int], program: str) -> None:
        super().__init__(folder, cores)
        self._command = ("true",) if program == "true" else (sys.executable, "-P", "-c", "pass")

    def bring_up(self, limit_s: float) -> Callable[[], None]:
        code = self.srun(*self._command).wait(limit_s)
        if code:
            raise RuntimeError(f"srun {' '.join(self._command)}: exit code {code}")
        return lambda: None


class Ours(_Startup):
    """Workers dial in, prove that they know the secret, and answer one call each."""

    def __init__(self, folder: Path, cores: list[int], kind: str) -> None:
        super().__init__(folder, cores)
        self._kind = kind

    def bring_up(self, limit_s: float) -> Callable[[], None]:
        from miles_hpc.control.opening import open_blocking_transport
        from miles_hpc.core.messages import Heartbeat, Shutdown
        from tools.bench_control.arm_ours import credentials, new_session

        secret = new_session(self.folder)
        transport = open_blocking_transport(self._kind, credentials(self.folder, "controller", 0), spin_s=0.0)
        listener = transport.listen(lambda endpoint, message, payload: None)
        command = (sys.executable, "-P", "-m", "tools.bench_control.worker", self._kind, listener.address, str(secret))
        step = self.srun(*command)
        deadline = Deadline(limit_s, f"{self._n} workers to join")
        while not transport.serve(lambda: len(listener.endpoints) >= self._n, deadline_s=0.5):
            deadline.what = f"{self._n} workers to join, {len(listener.endpoints)} have"
            deadline.check()
            if step.poll() is not None:
                raise RuntimeError(f"srun ended with {step.returncode}, {len(listener.endpoints)} workers had joined")
        workers = list(listener.endpoints.values())
        for call in [worker.begin(Heartbeat(), deadline_s=limit_s) for worker in workers]:
            call.result()

        def finish() -> None:
            for worker in workers:
                worker.notify(Shutdown(reason="measured"), deadline_s=limit_s)
            transport.serve(lambda: not listener.endpoints, deadline_s=limit_s)
            transport.close()
            code = step.wait(limit_s)
            if code:
                raise RuntimeError(f"srun of the workers ended with {code}")

        return finish

    def describe(self) -> dict[str, str]:
        return {"transport": self._kind}


class Ray(_Startup):
    """A head on one node, the others join it; then as many actors as there are tasks, each on a CPU of its own.

    The nodes of a box share one host, so every raylet gets ports and a folder of its own:
    raylets that start at once in one folder would take the same socket.
    """

    def __init__(self, folder: Path, cores: list[int]) -> None:
        import ray

        super().__init__(folder, cores)
        self._ray: Any = ray
        self._program = str(Path(sys.executable).with_name("ray"))

    def start(self, n_peers: int) -> None:
        super().start(n_peers)
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", self._nodelist()], capture_output=True, text=True, timeout=_CLIENT_S
        )
        self._nodes = listed.stdout.split()

    def _nodelist(self) -> str:
        command = ["squeue", "-h", "-j", self._job, "-o", "%N"]
        return subprocess.run(command, capture_output=True, text=True, timeout=_CLIENT_S).stdout.strip()

    def bring_up(self, limit_s: float) -> Callable[[], None]:
        deadline = Deadline(limit_s, f"{self._n} actors to answer")
        port = _free_port()
        address = f"{self._ray.util.get_node_ip_address()}:{port}"
        steps = [self._raylet(0, "--head", f"--port={port}", "--include-dashboard=false")]
        while not _listens(address):
            deadline.check()
            if steps[0].poll() is not None:
                raise RuntimeError(f"ray start --head ended with {steps[0].returncode}")
            time.sleep(0.01)
        steps += [self._raylet(index, f"--address={address}") for index in range(1, BOX_NODES)]
        self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        actor = self._ray.remote(num_cpus=1)(_Actor)
        actors = [actor.remote() for _ in range(self._n)]
        answers = [one.ping.remote() for one in actors]
        _, waiting = self._ray.wait(answers, num_returns=self._n, timeout=deadline.remaining_s)
        if waiting:
            raise RuntimeError(f"{self._n - len(waiting)} of {self._n} actors answered within {limit_s:.0f} s")
        self._ray.get(answers, timeout=_CLIENT_S)

        def finish() -> None:
            self._ray.shutdown()
            for step in steps:
                step.terminate()
            for step in steps:
                step.wait(_CLIENT_S)

        return finish

    def _raylet(self, index: int, *options: str) -> subprocess.Popen[bytes]:
        first = 20000 + index * 1000
        command = [self._program, "start", "--block", "--disable-usage-stats"]
        command += [f"--num-cpus={self._n // BOX_NODES}", f"--object-store-memory={100 << 20}"]
        command += [f"--min-worker-port={first}", f"--max-worker-port={first + 999}"]
        command += [
            f"--dashboard-agent-listen-port={first - 10000}",
            f"--temp-dir={self.folder / f'r{index}'}",
            *options,
        ]
        return self.srun(*command, options=("-N1", "-n1", "-w", self._nodes[index]))


class _Actor:
    def ping(self) -> None:
        return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
