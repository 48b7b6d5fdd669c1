"""Hosts on one machine: network namespaces joined by a bridge, with cables that can be pulled.

    namespace of the switch                     namespace of host h1 (network, name, mounts, System V ipc)
    bridge ─┬─ port1 ═════════ veth ═════════ eth0   198.18.0.1/24   2001:2::1/64
            └─ port2 ═════════ veth ═════════ eth0   of host h2 ...

The switch has a namespace of its own, so the real host gets neither an interface nor a route: nothing can leak in
either direction, networks can't collide, and none has a way out. The addresses are those that RFC 2544 and RFC 5180 set
aside for such tests. A namespace lives as long as the process that holds it, which ends when its standard input closes,
and programs are killed when their starter dies: after a `kill -9` of the user of this module nothing is left behind.

Hosts share the process table, the file systems and the clocks. For UCX they must be told not to share memory: UCX_ENV.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from miles_hpc.control.children import die_with_parent
from miles_hpc.core.errors import UserError
from tools.slurm_box.processes import find_binary

__all__ = ["UCX_ENV", "Host", "Network"]

#: What separate machines come down to for UCX: no shared memory, one network device.
UCX_ENV = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}

_SUBNET = "198.18.0"
_SUBNET6 = "2001:2:"
_MAX_HOSTS = 250
_COMMAND_S = 20.0

# sysfs shows the interfaces of the namespace that mounted it. Ends when the other end of stdin is closed.
_HOLD = """
hostname "$1" && mount -t sysfs sysfs /sys && mount -t tmpfs -o mode=1777 tmpfs /dev/shm || exit 1
mount --bind "$2" /etc/hosts && ip link set lo up || exit 1
echo ready
exec cat
"""


@dataclass(frozen=True, eq=False)
class Host:
    """One host of a network. `address` is its IPv4 address, `address6` its IPv6 address, both on eth0."""

    name: str
    address: str
    address6: str
    port: str  # the switch's end of its cable
    holder: subprocess.Popen[str]
    _programs: list[subprocess.Popen[Any]]

    def popen(
        self, argv: Sequence[str], *, environ: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on this host; `environ` is added to ours, `options` are those of subprocess.Popen.

        The pid is the program's own. It is killed with the network, and when the thread that calls this ends.
        """
        parent = os.getpid()
        process = subprocess.Popen(
            [*_entered(self.holder.pid), *argv],
            env={**os.environ, **(environ or {})},
            preexec_fn=lambda: die_with_parent(parent),
            **options,
        )
        self._programs.append(process)
        return process

    def ip(self, *args: str) -> None:
        """Run iproute2's ip on this host. Raises UserError when it fails."""
        _check([*_entered(self.holder.pid), find_binary("ip"), *args])


class Network:
    """Some hosts and their switch, from __enter__ to __exit__. Not thread-safe."""

    def __init__(self, n_hosts: int) -> None:
        """Raises UserError for an ordinary user, or for more hosts than the subnet has addresses."""
        if os.geteuid() != 0:
            raise UserError("network namespaces are made by root only; run as root")
        if not 1 <= n_hosts <= _MAX_HOSTS:
            raise UserError(f"a network of {n_hosts} hosts; expected 1 to {_MAX_HOSTS}")
        self._n_hosts = n_hosts
        self._programs: list[subprocess.Popen[Any]] = []
        self._undo = ExitStack()
        self._switch = 0
        self.hosts: list[Host] = []

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._undo.close()

    # ------------------------------------------------------------------------------------------ faults

    def cut(self, host: Host) -> None:
        """Pull the host's cable. Its programs run on; their sockets aren't told."""
        self._in_switch("link", "set", host.port, "down")

    def restore(self, host: Host) -> None:
        """Plug the cable in again."""
        self._in_switch("link", "set", host.port, "up")

    def blackhole(self, host: Host, *, to: Host) -> None:
        """Whatever `host` sends to `to` vanishes from now on; what `to` sends arrives."""
        host.ip("route", "add", "blackhole", f"{to.address}/32")
        host.ip("-6", "route", "add", "blackhole", f"{to.address6}/128")

    def clear_blackhole(self, host: Host, *, to: Host) -> None:
        """Undo `blackhole`."""
        host.ip("route", "del", "blackhole", f"{to.address}/32")
        host.ip("-6", "route", "del", "blackhole", f"{to.address6}/128")

    # ------------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="net-hosts-")))
        names = [f"h{n}" for n in range(1, self._n_hosts + 1)]
        hosts_file = folder / "hosts"
        lines = [f"{_SUBNET}.{n} {name}\n{_SUBNET6}:{n:x} {name}\n" for n, name in enumerate(names, start=1)]
        hosts_file.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
        switch, *holders = [self._hold(name, hosts_file) for name in ("switch", *names)]
        self._undo.callback(self._end_programs)
        for holder in (switch, *holders):
            if holder.stdout is None or holder.stdout.readline() != "ready\n":
                raise UserError("no network namespace: unshare failed; run as root of this machine, not of a container")
        self._switch = switch.pid
        plan = ["link add bridge type bridge mcast_snooping 0", "link set bridge up"]
        for n, (name, holder) in enumerate(zip(names, holders, strict=True), start=1):
            plan.append(f"link add port{n} type veth peer name eth0 netns {holder.pid}")
            plan.append(f"link set port{n} master bridge up")
            address, address6 = f"{_SUBNET}.{n}", f"{_SUBNET6}:{n:x}"
            self.hosts.append(Host(name, address, address6, f"port{n}", holder, self._programs))
        self._batch(switch.pid, plan)
        for host in self.hosts:
            addresses = [f"addr add {host.address}/24 dev eth0", f"addr add {host.address6}/64 dev eth0 nodad"]
            self._batch(host.holder.pid, [*addresses, "link set eth0 up"])

    def _hold(self, name: str, hosts_file: Path) -> subprocess.Popen[str]:
        kinds = ["--net", "--uts", "--ipc", "--mount"]
        holder = subprocess.Popen(
            [find_binary("unshare"), *kinds, find_binary("bash"), "-c", _HOLD, "host", name, str(hosts_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt of the terminal is for the user of the network
        )
        self._undo.callback(_release, holder)
        return holder

    def _end_programs(self) -> None:
        for program in self._programs:
            if program.poll() is None:
                program.kill()
        for program in self._programs:
            program.wait()
            for stream in (program.stdin, program.stdout, program.stderr):
                if stream is not None:
                    _close(stream)

    def _batch(self, pid: int, commands: list[str]) -> None:
        _check([*_entered(pid), find_binary("ip"), "-batch", "-"], text="\n".join(commands) + "\n")

    def _in_switch(self, *args: str) -> None:
        _check([*_entered(self._switch), find_binary("ip"), *args])


def _entered(pid: int) -> list[str]:
    """The start of a command line that runs in the namespaces of `pid`; nsenter doesn't fork for these kinds."""
    return [find_binary("nsenter"), f"--target={pid}", "--net", "--uts", "--ipc", "--mount", "--"]


def _check(argv: list[str], text: str | None = None) -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise UserError(f"{' '.join(argv)}: {said}; expected success as root: is iproute2 complete?")


def _release(holder: subprocess.Popen[str]) -> None:
    for stream in (holder.stdin, holder.stdout):
        if stream is not None:
            _close(stream)
    try:
        holder.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()


def _close(stream: Any) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        pass  # the program ended before it read what was left
