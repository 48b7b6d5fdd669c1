"""What is measured: cells, arms and goals, as pure data.

A cell is one operation that is timed over and over: begin `window` calls on each of `peers` peers, then wait for all
answers. So window 1 on one peer is a synchronous call, window 64 a batch, and window 1 on 64 peers a round.

Placement decides a lot. A halted core of a virtual machine takes some 50 us to wake, so two processes that sleep and
wake each other are ten times faster on one core than on two, while a batch gains from two. Cells with one peer are
measured in both placements (in a quick run only without payload and with 8 MiB); each arm counts with its better one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from miles_hpc.core.errors import UserError

__all__ = ["ARMS", "FIRST", "GOALS", "ArmSpec", "Cell", "Goal", "Settings", "adjusted", "full", "quick", "select"]

KIB = 1 << 10
MIB = 1 << 20
#: Nodes of the Slurm box for the start-up arms.
BOX_NODES = 4


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One timed operation. `operations` are timed per repeat after `warmup` untimed ones; fewer after `limit_s`."""

    name: str
    peers: int = 1
    window: int = 1
    placement: str = "free"  # free | apart | any (not touched)
    argument_bytes: int = 0
    result_bytes: int = 0
    operations: int = 1
    warmup: int = 0
    limit_s: float = 10.0

    @property
    def calls(self) -> int:
        """Calls in one operation."""
        return self.peers * self.window


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """A library, or a way of starting workers. `module:cls` is loaded by the caller process only."""

    name: str
    about: str
    module: str
    cls: str
    options: tuple[str, ...] = ()
    mpi: bool = False  # caller and peers are ranks of one world: a fresh mpiexec per stage
    startup: bool = False
    full_only: bool = False


def _ours(transport: str, face: str, *, full_only: bool = False) -> ArmSpec:
    within = {"tcp": "tcp (Unix sockets, within this host)", "tcp-only": "tcp through the network stack"}
    over = within.get(transport, transport)
    about = f"ours over {over}, {face} face on both sides, MACs on"
    if face == "nospin":
        about = f"ours over {over}, blocking face that sleeps at once (spin_s=0), MACs on"
    if transport == "loopback":
        about = f"ours within one process, {face} face: no sockets, no frame MACs"
    return ArmSpec(
        name=f"ours-{transport}-{face}",
        about=about,
        module="tools.bench_control.arm_ours",
        cls={"blocking": "BlockingOurs", "nospin": "NoSpinOurs", "asyncio": "AsyncioOurs"}[face],
        options=(transport,),
        mpi=transport == "mpi",
        full_only=full_only,
    )


def _startup(name: str, about: str, cls: str, *options: str, full_only: bool = False) -> ArmSpec:
    return ArmSpec(
        name=f"start-{name}",
        about=about,
        module="tools.bench_control.startup",
        cls=cls,
        options=options,
        startup=True,
        full_only=full_only,
    )


ARMS: dict[str, ArmSpec] = {
    spec.name: spec
    for spec in (
        ArmSpec(
            name="ray",
            about="Ray actor calls; payloads are numpy arrays, mapped by the receiver without a copy",
            module="tools.bench_control.arm_ray",
            cls="RayArm",
        ),
        ArmSpec(
            name="zmq-tcp",
            about="ZeroMQ over TCP: REQ/REP for window 1, DEALER/ROUTER above; no authentication",
            module="tools.bench_control.arm_zmq",
            cls="ZmqArm",
            options=("tcp",),
        ),
        ArmSpec(
            name="zmq-ipc",
            about="ZeroMQ over unix sockets, otherwise as zmq-tcp",
            module="tools.bench_control.arm_zmq",
            cls="ZmqArm",
            options=("ipc",),
        ),
        ArmSpec(
            name="ucx-raw",
            about="UCX tag messages through ucxx, blocking progress, reused buffers; no authentication",
            module="tools.bench_control.arm_ucx",
            cls="UcxArm",
        ),
        ArmSpec(
            name="mpi-raw",
            about="mpi4py with reused buffers; both sides poll without pause, so each burns a core",
            module="tools.bench_control.arm_mpi",
            cls="MpiArm",
            mpi=True,
        ),
        _ours("tcp", "blocking"),
        _ours("tcp", "nospin"),
        _ours("tcp", "asyncio"),
        _ours("tcp-only", "blocking"),
        _ours("ucx", "blocking"),
        _ours("ucx", "nospin", full_only=True),
        _ours("ucx", "asyncio", full_only=True),
        _ours("mpi", "blocking"),
        _ours("mpi", "asyncio", full_only=True),
        _ours("loopback", "asyncio"),
        _startup("srun", "srun true, from start to exit", "Srun", "true"),
        _startup("python", "srun python -c pass, from start to exit", "Srun", "python", full_only=True),
        _startup(
            "ours-tcp", "srun of workers, until all are authenticated and answered a call over tcp", "Ours", "tcp"
        ),
        _startup("ours-ucx", "as start-ours-tcp, over ucx", "Ours", "ucx", full_only=True),
        _startup("ray", "ray start on the same nodes, until as many actors answered a call", "Ray", full_only=True),
    )
}


#: Arms whose calls to one peer, or starts, the summary needs. They are repeated most, and come first in each repeat,
#: the lower number before the higher, so that they are measured even when time is short.
FIRST = {
    "ray": 0,
    "ours-tcp-blocking": 0,
    "ours-tcp-nospin": 0,
    "zmq-tcp": 0,
    "zmq-ipc": 1,
    "ours-tcp-only-blocking": 1,
    "start-srun": 0,
    "start-ours-tcp": 0,
    "ours-ucx-blocking": 1,
    "ucx-raw": 1,
    "mpi-raw": 1,
}


#: Numbers of peers per arm in a quick run; 1 for those that aren't named.
_QUICK_PEERS = {
    "ray": (1, 8),
    "zmq-tcp": (1, 8, 64),
    "ucx-raw": (1, 8),
    "mpi-raw": (1, 8),
    "ours-tcp-blocking": (1, 8, 64),
    "ours-tcp-nospin": (1, 8, 64),
    "ours-ucx-blocking": (1, 8),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured. `budget_s` bounds the repeats: none begins that wouldn't fit.

    `repeats` is for stages that the summary needs (`FIRST`), of which a run without noise needs more than of others.
    """

    cells: tuple[Cell, ...]
    startup: tuple[Cell, ...]
    repeats: int
    repeats_of_others: int
    startup_repeats: int
    budget_s: float
    quick: bool
    skipped: dict[tuple[str, int], str]  # (arm, peers) -> why


def _cells(*, calls: int, batches: int, bulk: int, limit_s: float, every_size_apart: bool) -> tuple[Cell, ...]:
    one: list[Cell] = [Cell(name="call", operations=calls, warmup=calls // 5)]
    sizes = ((KIB, "1 KiB", calls // 4), (64 * KIB, "64 KiB", calls // 8), (8 * MIB, "8 MiB", bulk))
    for size, text, operations in sizes:
        # More for large ones: until buffers and the kernel's pages have been used before, every arm ramps up.
        warmup = operations if size == 8 * MIB else max(2, operations // 5)
        one.append(Cell(name=f"{text} argument", argument_bytes=size, operations=operations, warmup=warmup))
        one.append(Cell(name=f"{text} result", result_bytes=size, operations=operations, warmup=warmup))
    more = max(3, bulk // 3)
    one.append(Cell(name="8 MiB argument x4", window=4, argument_bytes=8 * MIB, operations=more, warmup=2))
    one.append(Cell(name="8 MiB result x4", window=4, result_bytes=8 * MIB, operations=more, warmup=2))
    one.append(Cell(name="batch of 64", window=64, operations=batches, warmup=max(2, batches // 5)))
    apart = [
        msgspec.structs.replace(cell, name=f"{cell.name}, apart", placement="apart")
        for cell in one
        if every_size_apart or max(cell.argument_bytes, cell.result_bytes) in (0, 8 * MIB)
    ]
    many = [
        Cell(name="round of 8", peers=8, operations=batches, warmup=max(2, batches // 5)),
        Cell(name="8 peers x8", peers=8, window=8, operations=batches // 2, warmup=2),
        Cell(name="round of 64", peers=64, operations=batches // 2, warmup=2),
    ]
    return tuple(msgspec.structs.replace(cell, limit_s=limit_s) for cell in (*one, *apart, *many))


def _start(n: int, *, limit_s: float) -> Cell:
    return Cell(name=f"start of {n}", peers=n, placement="any", limit_s=limit_s)


def quick() -> Settings:
    """Within 50 s on 2 cores: what the summary needs twice, a choice of the rest once."""
    skipped = {
        (arm, peers): "left to the full run"
        for arm, spec in ARMS.items()
        if not spec.startup
        for peers in (1, 8, 64)
        if peers not in _QUICK_PEERS.get(arm, (1,))
    }
    return Settings(
        cells=_cells(calls=400, batches=20, bulk=10, limit_s=1.0, every_size_apart=False),
        startup=(_start(64, limit_s=20.0),),
        repeats=2,
        repeats_of_others=1,
        startup_repeats=1,
        budget_s=45.0,
        quick=True,
        skipped=skipped,
    )


def full() -> Settings:
    """Some ten minutes on 2 cores."""
    return Settings(
        cells=_cells(calls=2000, batches=60, bulk=24, limit_s=10.0, every_size_apart=True),
        startup=(_start(8, limit_s=120.0), _start(64, limit_s=300.0)),
        repeats=7,
        repeats_of_others=2,
        startup_repeats=3,
        budget_s=720.0,
        quick=False,
        skipped={},
    )


def adjusted(settings: Settings, *, repeats: int | None, scale: float) -> Settings:
    """With another number of repeats, and all numbers of operations multiplied. Raises UserError."""
    if repeats is not None and repeats < 1:
        raise UserError(f"--repeats {repeats}: expected 1 or more")
    if not 0 < scale <= 100:
        raise UserError(f"--scale {scale}: expected a factor above 0, 100 at most")

    def scaled(cell: Cell) -> Cell:
        operations = max(2, round(cell.operations * scale))
        return msgspec.structs.replace(cell, operations=operations, warmup=max(1, round(cell.warmup * scale)))

    cells = settings.cells if scale == 1.0 else tuple(scaled(cell) for cell in settings.cells)
    return replace(
        settings,
        cells=cells,
        repeats=repeats or settings.repeats,
        repeats_of_others=repeats or settings.repeats_of_others,
        startup_repeats=repeats or settings.startup_repeats,
    )


def select(names: str, *, quick: bool) -> tuple[ArmSpec, ...]:
    """The arms that match a comma-separated list of names or prefixes; all of this mode when it is empty.

    Raises UserError for a word that matches nothing.
    """
    if not names:
        return tuple(spec for spec in ARMS.values() if not (quick and spec.full_only))
    chosen: dict[str, ArmSpec] = {}
    for word in (word.strip() for word in names.split(",")):
        found = {n: spec for n, spec in ARMS.items() if n == word or n.startswith(f"{word}-")}
        if not found:
            raise UserError(f"--arms {names!r}: no arm {word!r}; expected some of {', '.join(ARMS)}, or a prefix")
        chosen |= found
    return tuple(chosen.values())


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on one value of the summary."""

    key: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float | None) -> bool | None:
        """None when nothing was measured."""
        if value is None:
            return None
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)


GOALS = (
    Goal(key="p50_ratio_ray_over_ours", at_least=30.0),
    Goal(key="calls_ratio_ours_over_ray", at_least=20.0),
    Goal(key="bulk_8mib_ratio_ours_over_ray", at_least=2.0),
    Goal(key="bulk_8mib_ratio_ours_over_zmq", at_least=0.7),
    Goal(key="bulk_8mib_ratio_ours_over_zmq_ipc", at_least=0.7),
    Goal(key="bulk_8mib_ratio_ours_over_ucx", at_least=0.7),
    Goal(key="startup_s_ours_minus_srun", at_most=3.0),
)
