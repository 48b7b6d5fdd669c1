"""Reports on the life of a run: signals, orphans, ports, neighbours on a node, and what a site leaves unsaid."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.render import render_job
from miles_hpc.cluster.site import template_folders
from miles_hpc.control.auth import new_secret
from miles_hpc.control.opening import open_transport
from miles_hpc.core.errors import AuthenticationError, MilesError
from miles_hpc.core.messages import Ack, Heartbeat, Message
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.transport import Credentials, Endpoint, HandlerResult, PeerIdentity, Transport
from tests.unit.runs import make_gpu_run, make_run, make_site
from tests.unit.test_site_files import SLURM_SITES

ROOT = Path(__file__).parents[2]
PATHS = RunPaths(Path("/runs/r"))
WAIT_S = 30.0


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("name", SLURM_SITES)
def test_the_signal_before_the_end_is_usr2_to_the_batch_shell_of_a_plain_job(name: str) -> None:
    """USR1 is NCCL's, an array's id is not its tasks', and without srun no step gets a signal."""
    site = make_site(name)
    for component in plan_job(make_gpu_run(site, "job.time=60"), site, PATHS).components:
        words = component.directives
        assert [w for w in words if w.startswith("--signal")] == [f"--signal=B:USR2@{make_run().job.signal_s}"]
        assert not [w for w in words if w.startswith(("--array", "-a"))]
        assert [w for w in words if w.startswith("--output")] == ["--output=/runs/r/attempts/slurm-%A.out"]


@pytest.mark.parametrize(("sent", "arrives"), [("USR1", "USR2"), ("USR2", "USR2"), ("TERM", "TERM")])
def test_the_batch_script_passes_a_signal_on_at_once(tmp_path: Path, sent: str, arrives: str) -> None:
    """bash handles a trap after its foreground command only: the supervisor isn't one."""
    program = tmp_path / "python"
    told = f"trap 'echo {{}} > {tmp_path}/seen; exit 10' {{}}"
    traps = "\n".join(told.format(name, name) for name in ("USR1", "USR2", "TERM"))
    program.write_text(f"#!/bin/bash\n{traps}\ntouch {tmp_path}/up\nwhile :; do sleep 0.05; done\n")
    program.chmod(0o755)
    plan = plan_job(make_run(f"python.controller={program}"), make_site(), PATHS)
    script = render_job(replace(plan, exports={}), template_folders())
    shell = subprocess.Popen(["bash", "-c", script], env={"PATH": os.environ["PATH"]}, start_new_session=True)
    try:
        _until((tmp_path / "up").exists)
        shell.send_signal(signal.Signals[f"SIG{sent}"])
        assert shell.wait(WAIT_S) == 10
        assert (tmp_path / "seen").read_text().strip() == arrives
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def _until(true: object) -> None:
    end = time.monotonic() + WAIT_S
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ ports, neighbours


def transport(name: str, secret: bytes) -> Transport:
    who = PeerIdentity(role="rollout", name=name, host="h", pid=1, attempt=1, term=1)
    return open_transport("tcp", Credentials(secret, who))


async def answer(endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
    return Ack()


def test_listeners_of_many_jobs_on_one_node_have_ports_of_their_own() -> None:
    """Ports are bound before anybody hears of them, and are made of no job id, whose remainders meet."""
    secret = new_secret()

    async def main() -> None:
        services = [transport(f"service-{i}", secret) for i in range(24)]
        listeners = await asyncio.gather(*(service.listen(answer) for service in services))
        assert len({listener.address for listener in listeners}) == 24
        asker = transport("asker", secret)
        for listener in listeners:
            endpoint = await asker.connect(listener.address, deadline_s=WAIT_S)
            assert isinstance((await endpoint.call(Heartbeat(), deadline_s=WAIT_S)).message, Ack)
        await asyncio.gather(*(listener.close() for listener in listeners))
        for one in (asker, *services):
            one.close()

    asyncio.run(main())


def test_a_port_that_another_job_took_over_is_no_peer() -> None:
    """Of two runs on a node, one dials where its own listener was and the other's is now."""
    ours, theirs = new_secret(), new_secret()

    async def main() -> None:
        neighbour = transport("controller", theirs)
        listener = await neighbour.listen(answer)
        asker = transport("asker", ours)
        with pytest.raises(AuthenticationError):
            await asker.connect(listener.address, deadline_s=WAIT_S)
        await listener.close()
        asker.close()
        neighbour.close()

    asyncio.run(main())


def test_a_proxy_variable_is_nothing_to_the_runs_own_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: a proxy that refuses
        dead = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, dead)
        monkeypatch.delenv("no_proxy", raising=False)
        secret = new_secret()

        async def main() -> None:
            service, asker = transport("service", secret), transport("asker", secret)
            listener = await service.listen(answer)
            endpoint = await asker.connect(listener.address, deadline_s=WAIT_S)
            assert isinstance((await endpoint.call(Heartbeat(), deadline_s=WAIT_S)).message, Ack)
            await listener.close()
            asker.close()
            service.close()

        asyncio.run(main())


def test_a_listener_that_never_answers_costs_a_deadline() -> None:
    """A port is open, and what listens there is no peer, or hangs: the connect must end."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(1)
        port = mute.getsockname()[1]

        async def main() -> None:
            asker = transport("asker", new_secret())
            begun = time.monotonic()
            with pytest.raises(MilesError, match=f"{port}"):
                await asker.connect(f"tcp://127.0.0.1:{port}", deadline_s=0.5)
            assert time.monotonic() - begun < WAIT_S
            asker.close()

        asyncio.run(main())


def sources() -> list[Path]:
    return [file for folder in ("miles_hpc", "launchers", "checkpoints") for file in (ROOT / folder).rglob("*.py")]


def test_nobody_counts_the_nodes_cores_for_the_jobs() -> None:
    """os.cpu_count() is the whole node, whatever the job's cgroup holds: workers by it starve each other."""
    for file in sources():
        names = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)}
        assert not names & {"cpu_count", "process_cpu_count"}, file


def test_no_process_is_ended_by_its_name() -> None:
    """A blanket kill ends the processes of the user's other jobs on the node."""
    words = {"pkill", "killall", "skill", "fuser"}
    for file in sources():
        texts = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
        assert not [t for t in texts if isinstance(t, str) and t in words], file
    for template in (ROOT / "sbatch").glob("*.j2"):
        assert not words & set(template.read_text().replace(";", " ").split()), template


# ------------------------------------------------------------------------------------------------ site files


@pytest.mark.parametrize("name", SLURM_SITES)
def test_a_partition_is_stated_or_known_to_be_found(name: str) -> None:
    """Not every cluster has a default partition, and a default isn't the one that is meant."""
    site = make_site(name)
    for component in plan_job(make_gpu_run(site, "job.time=60"), site, PATHS).components:
        stated = [word for word in component.directives if word.startswith("--partition=")]
        assert len(stated) == (1 if site.sbatch.partition_stated else 0)
        if not stated:
            assert any(word.startswith(("--qos=", "--constraint=")) for word in component.directives)
