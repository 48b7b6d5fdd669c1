"""The supervisor: torch-free, started by the batch script; parent of the controller and of one step per role.

    batch script ──▶ supervisor ──▶ controller
                        │              │ exit code: done / next allocation / failed / fenced / killed
                        │              ▼
                        │           restarted (a new term) while restarts are left
                        ├──▶ step trainer   ends ─▶ restarted as a whole (one MPI world)
                        ├──▶ step rollout   ends ─▶ its hosts that no newer step covers are restarted
                        └──▶ step sandbox   likewise

In a layout with one step over all roles that step is the trainer's: its end starts all of them again, and a host of
another role that is lost alone gets a step of its own. A node that Slurm gave up while the job goes on (--no-kill) is
replaced by a spare; without one, rollout and sandbox go on with the rest, and the trainer needs the next allocation.
Restarts go one after the other: each looks at the nodes and at the steps as the one before has left them.

It judges by evidence: an srun that ended says nothing about its tasks (killed, it leaves them running; after a node
failure it returned 0), so what is left of a step is cancelled by the step's name before a newer one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from miles_hpc.cluster.chain import record_outcome
from miles_hpc.cluster.nodelist import compress
from miles_hpc.cluster.site import role_python
from miles_hpc.control.children import ChildProcess
from miles_hpc.controller.in_touch import stay_in_touch
from miles_hpc.controller.steps import Step, StepStarter
from miles_hpc.core import exits
from miles_hpc.core.errors import FencedError, MilesError, ProtocolError
from miles_hpc.core.messages import Ack, Message, RestartHost, RestartRole, Shutdown
from miles_hpc.core.telemetry import EventLog
from miles_hpc.core.transport import Endpoint, HandlerResult
from miles_hpc.core.walltime import format_time

__all__ = ["Supervisor"]

_END_GRACE_S = 10.0
_RESTART_PAUSE_S = 0.5
_SHUTDOWN_S = 5.0
_LOOK_EVERY_S = 180.0
_QUICK_END_S = 15.0
_LONGEST_PAUSE_S = 30.0
#: A host that had to be started again so often is left out of the next allocation.
_TROUBLED_RESTARTS = 3


class Supervisor:
    """One allocation. `run` returns an exit code of `core.exits`."""

    def __init__(
        self,
        starter: StepStarter,
        secret: bytes,
        *,
        end_time: float | None,
        job_id: int | None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """`end_time` is the epoch second at which the allocation ends; None when nothing ends it.

        `look` sees after the next allocation: called in a thread each `_LOOK_EVERY_S` and when the end is announced.
        """
        self._starter = starter
        self._run = starter.run
        self._paths = starter.paths
        self._attempt = starter.attempt
        self._secret = secret
        self._end_time = end_time
        self._job_id = job_id
        self._events = EventLog(self._paths.events, "supervisor", attempt=self._attempt)
        self._incarnation: dict[str, int] = defaultdict(int)
        self._restarts: dict[str, int] = defaultdict(int)
        self._quick_ends: dict[str, int] = defaultdict(int)
        self._steps: list[Step] = []
        self._watchers: set[asyncio.Task[None]] = set()
        self._controller: ChildProcess | None = None
        self._ending = False
        self.reason = ""  # why it ended
        self.terminated = False  # ended from outside: whoever did that decides whether there is a next allocation
        self._failed: asyncio.Future[tuple[int, str]] | None = None  # exit code and why
        self._host_restarts: dict[str, list[str]] = defaultdict(list)  # reasons by host
        self._replaced: dict[str, str | None] = {}  # by given up node: the spare in its place
        self._look = look
        self._look_now = asyncio.Event()
        self._one_restart = asyncio.Lock()
        self._world = len(starter.hosts("trainer"))  # hosts of the trainer, whose number is fixed: it is one MPI world
        self.lost_nodes: dict[str, str] = {}  # replaced or given up in this allocation, with Slurm's reason

    async def run(self) -> int:
        """Start everything, keep it going, end everything. The outcome is written to the attempt's outcome.json."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._events.note(
            "allocation_start",
            job_id=self._job_id,
            hosts={role: list(self._starter.hosts(role)) for role in self._starter.roles},
            time_limit_s=None if self._end_time is None else round(self._end_time - time.time(), 1),
        )
        self._say_start()
        looking = asyncio.create_task(self._keep_looking(self._look)) if self._look is not None else None
        outcome, reason = "failed", ""
        try:
            for unit in self._starter.units:
                self._start({role: self._starter.hosts(role) for role in unit})
            code, reason = await self._keep_controller()
            if self.terminated and not reason:
                reason = "ended from outside, by SIGTERM"
            outcome = {exits.DONE: "completed", exits.NEXT_ALLOCATION: "continue", exits.FENCED: "fenced"}.get(
                code, "failed"
            )
            return code
        except FencedError as error:
            outcome, reason = "fenced", str(error)
            return exits.FENCED
        finally:
            if looking is not None:
                looking.cancel()  # a look under way ends in its thread, which the event loop's end waits for
            await self._end_all()
            self._say(f"attempt {self._attempt} ended: {outcome}" + (f": {reason}" if reason else ""))
            self._events.note("allocation_end", outcome=outcome, reason=reason)
            self.reason = reason
            record_outcome(self._paths, self._attempt, outcome, reason)
            self._events.close()

    def _say(self, text: str) -> None:
        """A line of the job's output, if there is a job; that may be on a full file system, and the run goes on."""
        if self._job_id is not None:
            with contextlib.suppress(OSError):
                print(f"supervisor: {text}", flush=True)

    def _say_start(self) -> None:
        hosts = "; ".join(f"{role} {compress(self._starter.hosts(role))}" for role in self._starter.roles)
        left = "no limit" if self._end_time is None else format_time(max(0.0, self._end_time - time.time()))
        self._say(f"run {self._run.name}, attempt {self._attempt}, job {self._job_id}: {hosts}")
        self._say(f"time left: {left}; logs are in {self._paths.logs(self._attempt)}")

    async def _keep_looking(self, look: Callable[[], None]) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _LOOK_EVERY_S)
            self._look_now.clear()
            await asyncio.to_thread(look)

    # ------------------------------------------------------------------------------------------ controller

    async def _keep_controller(self) -> tuple[int, str]:
        """Start the controller, and again when it breaks; returns its final exit code and why."""
        assert self._failed is not None
        while True:
            self._controller = self._start_controller()
            link = asyncio.create_task(
                stay_in_touch(
                    self._run, self._paths, self._attempt, self._secret, self._controller, self._handle, self._silent
                )
            )
            ended = asyncio.create_task(self._controller.wait())
            ends: set[asyncio.Future[Any]] = {ended, self._failed}
            await asyncio.wait({*ends, link}, return_when=asyncio.FIRST_COMPLETED)
            if link.done() and (fenced := link.exception()) is not None:
                await self._controller.end(_END_GRACE_S)
                raise fenced
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            link.cancel()
            await asyncio.gather(link, return_exceptions=True)
            if not ended.done():
                await self._controller.end(_END_GRACE_S + self._save_s)
                return self._failed.result()
            code = ended.result()
            if code in (exits.DONE, exits.NEXT_ALLOCATION, exits.FENCED, exits.USER_ERROR):
                return code, self._controller.log_tail().strip().rpartition("\n")[2] if code == exits.USER_ERROR else ""
            if self._ending:  # by the signal itself, say, when that came while it was starting
                return exits.FAILED, ""
            evidence = f"controller ended with {code}"
            self._events.verdict("lost", peer="controller", evidence=evidence, log_tail=self._controller.log_tail())
            self._say(f"{evidence}: see {self._paths.logs(self._attempt) / 'controller.log'}")
            self._restarts["controller"] += 1
            if self._restarts["controller"] > self._run.control.max_role_restarts:
                return exits.FAILED, f"{evidence}, after {self._restarts['controller']} starts"
            await asyncio.sleep(_RESTART_PAUSE_S)
            if self.terminated:  # meanwhile, and nobody would tell the next one
                return exits.FAILED, ""

    def _start_controller(self) -> ChildProcess:
        command = [role_python(self._run, self._starter.site, "controller"), "-P", "-m", "launchers.controller"]
        command += ["--run-dir", str(self._paths.root), "--attempt", str(self._attempt)]
        if self._end_time is not None:
            command += ["--end-time", str(self._end_time)]
        return ChildProcess("controller", command, log=self._paths.logs(self._attempt) / "controller.log")

    def _silent(self, evidence: str) -> None:
        self._say(f"the controller is silent, {evidence}: ending it")
        self._events.verdict("silent", peer="controller", evidence=evidence)

    async def _handle(self, endpoint: Endpoint, message: Message, payload: memoryview) -> HandlerResult:
        if self._ending or isinstance(message, Shutdown):
            return Ack()  # it ends when the controller has ended
        if isinstance(message, RestartHost):
            if message.host not in self._starter.hosts(message.role) and message.host not in self._replaced:
                self._events.note("left", peer=message.host, role=message.role, evidence=message.reason)
                return Ack()  # it joined from outside: whoever started it there may start it again
            async with self._one_restart:
                await self._restart_hosts(message.role, (message.host,), message.reason, after=message.incarnation)
            return Ack()
        if isinstance(message, RestartRole):
            if self._incarnation[message.role] <= message.incarnation:
                for step in [s for s in self._steps if message.role in s.hosts]:
                    await self._starter.end(step)  # its watcher starts the role again
            return Ack()
        raise ProtocolError(f"the supervisor takes RestartHost and RestartRole, got {type(message).__name__}")

    # ------------------------------------------------------------------------------------------ steps

    def _start(self, hosts: dict[str, tuple[str, ...]]) -> None:
        incarnation = 1 + max(self._incarnation[role] for role in hosts)
        for role in hosts:
            self._incarnation[role] = incarnation
        for step in self._starter.start(hosts, incarnation):
            self._steps.append(step)
            watcher = asyncio.create_task(self._watch(step))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watched)

    def _watched(self, watcher: asyncio.Task[None]) -> None:
        """A watcher that broke would leave its step's hosts empty for ever: the allocation ends instead."""
        self._watchers.discard(watcher)
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            self._fail(exits.FAILED, f"a step could not be started again: {type(error).__name__}: {error}")

    async def _restart_hosts(self, role: str, hosts: tuple[str, ...], reason: str, *, after: int) -> None:
        """Start some hosts of a role again: where Slurm gave a node up, the spare in its place, or the rest.

        Those that a step newer than incarnation `after` covers run already; so does a spare that has a step.
        """
        await self._give_up_nodes()
        if self._over or not self._enough_nodes(reason):
            return
        left = []
        for host in hosts:
            now = self._in_place_of(host)
            steps = [s for s in self._steps if now in s.hosts.get(role, ())]
            if now is not None and not any(s.incarnation > after or now != host for s in steps):
                left.append(now)
                self._host_restarts[now].append(reason)
        if left:
            self._restart({role: tuple(left)}, reason)

    async def _restart_unit(self, role: str, reason: str) -> None:
        """Start a role and all that share its step again, on all hosts that are left or in others' places."""
        (unit,) = [unit for unit in self._starter.units if role in unit]
        for step in [s for s in self._steps if set(s.hosts) <= set(unit)]:  # of hosts that had been started alone
            await self._starter.end(step)
        await self._give_up_nodes()  # last, so that the hosts are those of now
        if not self._over and self._enough_nodes(reason):
            self._restart({name: self._starter.hosts(name) for name in unit}, reason)

    def _enough_nodes(self, reason: str) -> bool:
        """Whether the allocation can go on with the nodes that are left; it ends where it can't."""
        if len(self._starter.hosts("trainer")) < self._world:
            self._fail(exits.NEXT_ALLOCATION, f"a node of the trainer failed and no spare is left: {reason}")
            return False
        if empty := [role for role in self._starter.roles if not self._starter.hosts(role)]:
            self._fail(exits.NEXT_ALLOCATION, f"no node of role {empty[0]} is left: {reason}")
            return False
        return True

    def _in_place_of(self, host: str) -> str | None:
        """The host itself, or the last of the spares that took its place one after the other; None without one."""
        now: str | None = host
        while now is not None and now in self._replaced:
            now = self._replaced[now]
        return now

    @property
    def _over(self) -> bool:
        """Whether nothing is started any more."""
        return self._ending or (self._failed is not None and self._failed.done())

    async def _give_up_nodes(self) -> None:
        """Take nodes that Slurm gave up out of their roles, whichever role's restart finds them."""
        try:
            failed = await self._starter.failed_nodes()
        except MilesError as error:  # Slurm doesn't answer: the next restart asks again
            self._events.note("nodes_unknown", error=str(error))
            return
        for role in self._starter.roles:
            for host in self._starter.hosts(role):
                if host in failed:
                    spare = self._replaced[host] = self._starter.replace(role, host)
                    self.lost_nodes[host] = failed[host]
                    told = f"{failed[host]}; {spare or 'no spare'} in its place"
                    self._say(f"node {host} of {role} failed: {told}")
                    self._events.verdict("node_failed", peer=host, role=role, evidence=told)

    def _restart(self, hosts: dict[str, tuple[str, ...]], reason: str) -> None:
        role = next(iter(hosts))
        self._restarts[role] += 1
        told = {name: list(some) for name, some in hosts.items()}
        where = ", ".join(f"{name} on {compress(some)}" for name, some in hosts.items())
        self._say(f"starting again: {where}: {reason}")
        self._events.verdict("restart", peer=role, hosts=told, evidence=reason, count=self._restarts[role])
        if self._restarts[role] > self._run.control.max_role_restarts:
            self._fail(exits.FAILED, f"role {role} was started {self._restarts[role]} times: {reason}")
            return
        self._start(hosts)

    def _fail(self, code: int, reason: str) -> None:
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_result((code, reason))

    async def _watch(self, step: Step) -> None:
        """Wait for a step's end, clean up after it, and start again what no newer step covers."""
        began = time.monotonic()
        code = await step.process.wait()
        # Exit code 0: the agents were told to end, and the controller ends in a moment. Or srun says 0 after a node
        # failure; then the controller stays and the step is started again.
        until = time.monotonic() + (_SHUTDOWN_S if code == 0 else self._restart_pause_s(step, began))
        while not self._ending and time.monotonic() < until:
            await asyncio.sleep(0.1)
        if self._ending:
            return
        await self._starter.end(step)
        if step not in self._steps:
            return
        self._steps.remove(step)
        reason = f"step {step.name} ended with {code}"
        async with self._one_restart:
            if self._over:
                return
            if "trainer" not in step.hosts:
                for role, hosts in step.hosts.items():
                    await self._restart_hosts(role, hosts, reason, after=step.incarnation)
            elif not any("trainer" in s.hosts and s.incarnation > step.incarnation for s in self._steps):
                await self._restart_unit("trainer", reason)

    @property
    def _save_s(self) -> float:
        """How long the controller may take over the state that the trainer still holds before it is killed."""
        trains = any("trainer" in step.hosts and step.process.exit_code is None for step in self._steps)
        return self._run.control.call_deadline_s if trains else 0.0

    @property
    def troubled_hosts(self) -> dict[str, str]:
        """Hosts that had to be started again and again, with the last reason: the next allocation does without them."""
        return {host: why[-1] for host, why in self._host_restarts.items() if len(why) >= _TROUBLED_RESTARTS}

    def _restart_pause_s(self, step: Step, began: float) -> float:
        """Longer each time that a role's step ends right after its start: the cause may need time to go away."""
        quick = time.monotonic() - began < _QUICK_END_S
        role = step.roles[0]
        self._quick_ends[role] = self._quick_ends[role] + 1 if quick else 0
        return min(_LONGEST_PAUSE_S, _RESTART_PAUSE_S * 2.0 ** self._quick_ends[role])

    async def _end_all(self) -> None:
        self._ending = True
        if self._controller is not None and self._controller.exit_code is None:
            await self._controller.end(_END_GRACE_S)
        waits = [asyncio.create_task(step.process.wait()) for step in self._steps]
        if waits:  # the controller told the agents to shut down; give them a moment
            await asyncio.wait(waits, timeout=_END_GRACE_S)
        await asyncio.gather(*(self._starter.end(step) for step in self._steps), return_exceptions=True)
        for wait in waits:
            wait.cancel()

    # ------------------------------------------------------------------------------------------ signals

    def _on_signal(self, number: signal.Signals) -> None:
        """The allocation ends soon (USR1, USR2) or now (TERM): the controller drains, saves, and says how it went."""
        self._events.note("signal", signal=number.name)
        print(f"supervisor: {number.name}: told the controller", file=sys.stderr, flush=True)
        self._look_now.set()
        soon = number in (signal.SIGUSR1, signal.SIGUSR2)
        if not soon:
            self.terminated = self._ending = True  # nothing is started any more: Slurm ends the steps as well
        if self._controller is not None:
            self._controller.signal(signal.SIGUSR1 if soon else signal.SIGTERM)
