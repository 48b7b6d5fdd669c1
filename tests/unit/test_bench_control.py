"""The control benchmark's pure parts, its processes, and one small run of it."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from tools.bench_control import arm, peers, plan, raw
from tools.bench_control.run import Report, stages_of
from tools.bench_control.session import Session, descendants, environment
from tools.bench_control.spread import ArmResult, Measured, combine, percentile, spread
from tools.bench_control.summary import summarise
from tools.slurm_box.processes import process_of

REPOSITORY = Path(__file__).resolve().parents[2]
PLACEMENTS = ("", ", apart")
MIB8 = 8 << 20

# ------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    ("ordered", "fraction", "expected"),
    [
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.9, 4.6),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.0, 1.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1.0, 5.0),
    ],
)
def test_percentile_interpolates(ordered: list[float], fraction: float, expected: float) -> None:
    assert percentile(ordered, fraction) == pytest.approx(expected)


@given(st.lists(st.floats(min_value=1e-7, max_value=10.0), min_size=1, max_size=200))
def test_spread_is_ordered_and_bounded(samples: list[float]) -> None:
    found = spread(samples)
    assert min(samples) <= found.p10 <= found.p50 <= found.p90 <= found.p99 <= found.max == max(samples)
    assert found.n == len(samples)
    assert found.total == pytest.approx(sum(samples))
    assert found.p50 == pytest.approx(statistics.median(samples))


def test_spread_and_combine_refuse_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    with pytest.raises(ValueError, match="no repeats"):
        combine(plan.Cell(name="call"), [])


def test_combine_takes_medians_of_repeats_and_counts_calls_and_bytes() -> None:
    cell = plan.Cell(name="8 peers x8", peers=8, window=8, argument_bytes=1000)
    measured = combine(cell, [spread([0.1, 0.1]), spread([0.2, 0.4]), spread([0.3, 0.3, 0.3])])
    assert measured.repeats == 3
    assert measured.operations == (2, 2, 3)
    assert measured.p50_s_of_repeats == pytest.approx((0.1, 0.3, 0.3))
    assert measured.p50_s == pytest.approx(0.3)
    assert measured.max_s == pytest.approx(0.4)
    assert measured.calls_per_s_of_repeats == pytest.approx((640.0, 64 * 2 / 0.6, 64 * 3 / 0.9))
    assert measured.calls_per_s == pytest.approx(64 / 0.3)
    assert measured.gb_per_s == pytest.approx(64 / 0.3 * 1000 / 1e9)


# ------------------------------------------------------------------------------------------------ what is measured


@pytest.mark.parametrize("settings", [plan.quick(), plan.full()], ids=["quick", "full"])
def test_every_size_and_number_of_peers_is_measured_in_both_directions(settings: plan.Settings) -> None:
    cells = settings.cells
    assert len({cell.name for cell in cells}) == len(cells)
    for size in (1 << 10, 64 << 10, MIB8):
        for placement in ("free", "apart") if size == MIB8 or not settings.quick else ("free",):
            one = [cell for cell in cells if cell.calls == 1 and cell.placement == placement]
            assert [cell for cell in one if cell.argument_bytes == size]
            assert [cell for cell in one if cell.result_bytes == size]
    assert {cell.peers for cell in cells} == {1, 8, 64}
    assert {cell.window for cell in cells if cell.peers == 1} == {1, 4, 64}
    assert all(cell.operations > 0 and cell.warmup > 0 for cell in cells)


def test_selection_by_name_and_prefix() -> None:
    names = [spec.name for spec in plan.select("zmq, ours-tcp-asyncio", quick=True)]
    assert names == ["zmq-tcp", "zmq-ipc", "ours-tcp-asyncio"]
    assert "start-ray" not in {spec.name for spec in plan.select("", quick=True)}
    assert "start-ray" in {spec.name for spec in plan.select("", quick=False)}
    assert [spec.name for spec in plan.select("start-ray", quick=True)] == ["start-ray"]
    with pytest.raises(UserError, match="no arm 'zeromq'; expected some of ray, zmq-tcp"):
        plan.select("ray,zeromq", quick=True)


@pytest.mark.parametrize(("repeats", "scale"), [(0, 1.0), (None, 0.0), (None, -1.0)])
def test_senseless_amounts_are_refused(repeats: int | None, scale: float) -> None:
    with pytest.raises(UserError, match="expected"):
        plan.adjusted(plan.quick(), repeats=repeats, scale=scale)


def test_scaling_changes_operations_only() -> None:
    small = plan.adjusted(plan.full(), repeats=2, scale=0.01)
    for before, after in zip(plan.full().cells, small.cells, strict=True):
        assert after.operations == max(2, round(before.operations * 0.01))
        assert (after.peers, after.window, after.argument_bytes) == (before.peers, before.window, before.argument_bytes)
    assert (small.repeats, small.repeats_of_others, small.startup_repeats) == (2, 2, 2)


def test_what_a_quick_run_leaves_out_is_said() -> None:
    settings = plan.quick()
    stages, arms = stages_of(plan.select("ray,start", quick=True), settings)
    assert {(stage.spec.name, stage.n_peers) for stage in stages if not stage.spec.startup} == {("ray", 1), ("ray", 8)}
    assert arms["ray"].errors == {"64 peers": "left out: left to the full run"}
    assert [stage.name for stage in stages if stage.spec.name == "start-srun"] == ["start of 64"]


@pytest.mark.parametrize("spec", plan.ARMS.values(), ids=lambda spec: spec.name)
def test_every_arm_names_a_class_that_can_be_made(spec: plan.ArmSpec) -> None:
    module = __import__(spec.module, fromlist=[spec.cls])
    cls = getattr(module, spec.cls)
    assert issubclass(cls, arm.Arm)
    assert not getattr(cls, "__abstractmethods__", None)
    assert (hasattr(module, "serve_rank")) or not spec.mpi


# ------------------------------------------------------------------------------------------------ summary


def measured(cell: plan.Cell, seconds: float) -> Measured:
    return combine(cell, [spread([seconds])])


def arm_with(call_us: float, calls_per_s: float, argument_gb: float, result_gb: float) -> ArmResult:
    """An arm that is as fast as said when left to the scheduler, and half as fast apart."""
    result = ArmResult(about="recorded")
    for factor, suffix in ((1.0, ""), (2.0, ", apart")):
        placement = "apart" if suffix else "free"
        cells = {
            plan.Cell(name="call", placement=placement): call_us * 1e-6,
            plan.Cell(name="batch of 64", placement=placement, window=64): 64 / calls_per_s,
            plan.Cell(name="8 MiB argument", placement=placement, argument_bytes=MIB8): MIB8 / argument_gb / 1e9,
            plan.Cell(name="8 MiB result", placement=placement, result_bytes=MIB8): MIB8 / result_gb / 1e9,
        }
        for cell, seconds in cells.items():
            result.cells[f"{cell.name}{suffix}"] = measured(cell, seconds * factor)
    return result


def start_of(*widths: tuple[int, float]) -> ArmResult:
    result = ArmResult(about="recorded")
    for width, seconds in widths:
        cell = plan.Cell(name=f"start of {width}", peers=width, placement="any")
        result.cells[cell.name] = measured(cell, seconds)
    return result


def recorded() -> dict[str, ArmResult]:
    return {
        "ray": arm_with(620.0, 5000.0, 0.9, 0.5),
        "zmq-tcp": arm_with(25.0, 125000.0, 2.5, 4.0),
        "zmq-ipc": arm_with(25.0, 125000.0, 2.5, 2.5),
        "ucx-raw": arm_with(30.0, 50000.0, 1.0, 2.0),
        "mpi-raw": arm_with(2.0, 400000.0, 8.0, 8.0),
        "ours-tcp-blocking": arm_with(30.0, 80000.0, 2.0, 1.0),
        "ours-tcp-nospin": arm_with(20.0, 110000.0, 1.5, 1.5),
        "ours-tcp-only-blocking": arm_with(35.0, 80000.0, 2.0, 1.0),
        "ours-ucx-blocking": arm_with(40.0, 60000.0, 1.5, 1.5),
        "start-srun": start_of((8, 0.1), (64, 0.3)),
        "start-ours-tcp": start_of((8, 0.6), (64, 2.3)),
        "start-ray": start_of((8, 20.0)),
    }


def test_summary_of_a_whole_run() -> None:
    found = summarise(recorded())
    assert found["ours_transport"] == "tcp"
    assert found["p50_us_ours"] == pytest.approx(20.0)
    assert found["p50_arm_ours"] == "ours-tcp-nospin, free"
    assert found["p50_ratio_ray_over_ours"] == pytest.approx(31.0)
    assert found["calls_ratio_ours_over_ray"] == pytest.approx(22.0)
    # argument 2.0 (spinning) over 0.9, result 1.5 (sleeping) over 0.5: the worse of the two
    assert found["bulk_8mib_ratio_ours_over_ray"] == pytest.approx(2.0 / 0.9)
    # argument 2.0 over 2.5, result 1.0 over 4.0, both through the network stack
    assert found["bulk_8mib_ratio_ours_over_zmq"] == pytest.approx(0.25)
    # argument 2.0 over 2.5, result 1.5 over 2.5, both over Unix sockets
    assert found["bulk_8mib_ratio_ours_over_zmq_ipc"] == pytest.approx(0.6)
    # argument 1.5 over 1.0, result 1.5 over 2.0, both on ucx
    assert found["bulk_8mib_ratio_ours_over_ucx"] == pytest.approx(0.75)
    assert found["bulk_8mib_ratio_ours_over_mpi"] is None  # ours-mpi wasn't measured
    assert found["startup_workers"] == 64
    assert found["startup_s_ours_minus_srun"] == pytest.approx(2.0)
    assert found["startup_s_ray"] is None  # measured with 8 only
    assert found["startup_s_by_workers"]["start-ray"] == {"8": pytest.approx(20.0)}
    assert found["by_transport"]["ucx"]["p50_ratio_ray_over_ours"] == pytest.approx(15.5)
    assert found["by_transport"]["mpi"]["p50_us"] is None
    met = {key: goal["met"] for key, goal in found["goals"].items()}
    assert met == {
        "p50_ratio_ray_over_ours": True,
        "calls_ratio_ours_over_ray": True,
        "bulk_8mib_ratio_ours_over_ray": True,
        "bulk_8mib_ratio_ours_over_zmq": False,
        "bulk_8mib_ratio_ours_over_zmq_ipc": False,
        "bulk_8mib_ratio_ours_over_ucx": True,
        "startup_s_ours_minus_srun": True,
    }


def test_each_arm_counts_with_its_better_placement() -> None:
    arms = recorded()
    ray = arms["ray"].cells
    ray["call"], ray["call, apart"] = ray["call, apart"], ray["call"]
    assert summarise(arms)["p50_us_ray"] == pytest.approx(620.0)
    del ray["call, apart"]
    assert summarise(arms)["p50_us_ray"] == pytest.approx(1240.0)


@pytest.mark.parametrize(
    "missing",
    [
        "ray",
        "zmq-tcp",
        "zmq-ipc",
        "ours-tcp-only-blocking",
        "ucx-raw",
        "ours-ucx-blocking",
        "start-srun",
        "start-ours-tcp",
    ],
)
def test_what_was_not_measured_is_none_and_the_rest_stays(missing: str) -> None:
    arms = recorded()
    arms[missing] = ArmResult(about="recorded", errors={"1 peer": "No module named 'x'"})
    found = summarise(arms)
    keys = {
        "ray": ["p50_ratio_ray_over_ours", "calls_ratio_ours_over_ray", "bulk_8mib_ratio_ours_over_ray"],
        "zmq-tcp": ["bulk_8mib_ratio_ours_over_zmq"],
        "zmq-ipc": ["bulk_8mib_ratio_ours_over_zmq_ipc"],
        "ours-tcp-only-blocking": ["bulk_8mib_ratio_ours_over_zmq"],
        "ucx-raw": ["bulk_8mib_ratio_ours_over_ucx"],
        "ours-ucx-blocking": ["bulk_8mib_ratio_ours_over_ucx"],
        "start-srun": ["startup_s_ours_minus_srun"],
        "start-ours-tcp": ["startup_s_ours_minus_srun"],
    }[missing]
    whole = summarise(recorded())
    for key in whole["goals"]:
        assert (found[key] is None) == (key in keys), key
        assert (found["goals"][key]["met"] is None) == (key in keys), key
    assert found["p50_us_ours"] == pytest.approx(20.0)


def test_summary_of_nothing_has_every_key() -> None:
    found = summarise({})
    assert found.keys() == summarise(recorded()).keys()
    assert found["ours_transport"] is None
    assert all(found[key] is None for key in found["goals"])


def test_the_report_is_one_json_object() -> None:
    arms = recorded()
    report = Report({"cores": 2}, arms, summarise(arms))
    check_shape(json.loads(msgspec.json.encode(report.as_json())))


def check_shape(report: dict[str, Any]) -> None:
    """The benchmark's contract, as far as it is about shape."""
    assert list(report) == ["conditions", "arms", "summary"]
    assert {
        "p50_us_ours",
        "p50_ratio_ray_over_ours",
        "calls_ratio_ours_over_ray",
        "bulk_8mib_ratio_ours_over_ray",
        "bulk_8mib_ratio_ours_over_ucx",
        "bulk_8mib_ratio_ours_over_zmq",
        "bulk_8mib_ratio_ours_over_zmq_ipc",
        "startup_s_ours_minus_srun",
        "ours_transport",
    } <= report["summary"].keys()
    for result in report["arms"].values():
        msgspec.convert(result, ArmResult)
        for cell in result["cells"].values():
            assert cell["p10_s"] <= cell["p50_s"] <= cell["p90_s"] <= cell["p99_s"] <= cell["max_s"]
            assert len(cell["p50_s_of_repeats"]) == len(cell["operations"]) == cell["repeats"]


# ------------------------------------------------------------------------------------------------ protocol, processes


def test_raw_requests_say_what_they_want() -> None:
    answers = raw.Answers()
    result = raw.request(plan.Cell(name="x", result_bytes=1000))
    assert answers.to(result) == raw.pattern(1000)
    argument = raw.request(plan.Cell(name="x", argument_bytes=1000))
    assert len(argument) == 1000
    assert answers.to(argument) == raw.pattern(raw.HEAD_BYTES)
    echo = raw.stamped(raw.ECHO, b"some content of forty bytes, not a pattern")
    assert answers.to(echo + b"rest of a buffer that is used again") == echo
    assert answers.to(raw.stamped(raw.STOP, b"")) is None


class Liar(arm.Arm):
    """Sends back something else."""

    def __init__(self, folder: Path, *, wrong: str) -> None:
        super().__init__(folder, [0])
        self._wrong = wrong

    def start(self, n_peers: int) -> None:
        pass

    def operation(self, cell: plan.Cell) -> Any:
        return lambda: None

    def echo(self, peer: int, data: bytes) -> bytes:
        return data[::-1] if self._wrong == "echo" else data

    def fetch(self, peer: int, n_bytes: int) -> bytes:
        return bytes(n_bytes) if self._wrong == "fetch" else raw.pattern(n_bytes)

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("wrong", ["echo", "fetch"])
def test_changed_content_is_noticed(tmp_path: Path, wrong: str) -> None:
    cell = plan.Cell(name="x", result_bytes=5000)
    Liar(tmp_path, wrong="").check(cell)
    with pytest.raises(ValueError, match="x: "):
        Liar(tmp_path, wrong=wrong).check(cell)


def test_a_cell_ends_at_its_limit() -> None:
    samples = arm.timed(lambda: None, 10**9, 0.05)
    assert 1 < len(samples) < 10**9


def test_placement_binds_caller_and_peers(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    liar = Liar(tmp_path, wrong="")
    liar.cores = cores
    liar.peer_pids = [child.pid]
    try:
        liar.place("apart")
        assert os.sched_getaffinity(0) == {cores[0]}
        assert os.sched_getaffinity(child.pid) == {cores[1] if len(cores) > 1 else cores[0]}
        liar.place("free")
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == set(cores)
    finally:
        os.sched_setaffinity(0, cores)
        child.communicate(b"\n", timeout=30)


def test_a_failing_peer_is_named_at_once(tmp_path: Path) -> None:
    peers.publish(tmp_path, 0, "tcp://127.0.0.1:1")
    assert peers.addresses(tmp_path, 1) == ["tcp://127.0.0.1:1"]
    peers.failed(tmp_path, 1, UserError("no such transport"))
    with pytest.raises(RuntimeError, match="peer 1: UserError: no such transport"):
        peers.addresses(tmp_path, 2)


def test_peers_are_forked_and_end_with_their_parent(tmp_path: Path) -> None:
    forked = peers.ForkedPeers("tools.bench_control.arm_ours", tmp_path / "log")
    try:
        pids = forked.start(3, tmp_path, "serve_nospin", "tcp", str(tmp_path))  # no secret there: they fail
        assert len(set(pids)) == 3
        with pytest.raises(RuntimeError, match=r"peer [012]: FileNotFoundError"):
            peers.addresses(tmp_path, 3)
    finally:
        forked.close()
    assert not any(one.alive for one in map(process_of, pids) if one is not None)


def test_a_session_ends_with_all_its_processes(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"bench-test-{os.getpid()}"  # unix sockets need a short path
    session = Session(plan.ARMS["ours-tcp-nospin"], folder, sorted(os.sched_getaffinity(0)), 2, environment({}))
    try:
        session.start(2, 60.0)
        family = descendants(session.pid)
        assert len(family) >= 3  # the process that forks, two peers
    finally:
        session.close()
        subprocess.run(["rm", "-r", str(folder)], check=True)
    assert not any(process.alive for process in family)


# ------------------------------------------------------------------------------------------------ a small run


@pytest.mark.slow
def test_a_small_run_gives_the_whole_object(tmp_path: Path) -> None:
    """Arms without Ray and Slurm; what isn't installed here must be told with its reason."""
    command = [sys.executable, "-P", "-m", "tools.bench_control", "--quick", "--json", "--repeats", "1"]
    command += ["--scale", "0.02", "--arms", "ours-tcp,ours-loopback,zmq-tcp,mpi-raw,ucx-raw"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    check_shape(report)
    conditions = report["conditions"]
    assert conditions["repeats_done"] == 1
    assert conditions["payload_bytes"] == [0, 1024, 65536, MIB8]
    assert conditions["versions"]["msgspec"]
    for name, result in report["arms"].items():
        assert result["cells"] or result["errors"], name
    ours = report["arms"]["ours-tcp-nospin"]
    if "1 peer" not in ours["errors"]:  # left out only when the machine is so busy that the time is over
        assert {cell.name for cell in plan.quick().cells if cell.peers == 1} <= ours["cells"].keys()
        assert report["summary"]["ours_transport"] in ("tcp", "tcp-only")
        assert report["summary"]["p50_us_ours"] > 0
    assert report["summary"]["p50_ratio_ray_over_ours"] is None
    assert report["summary"]["startup_s_ours_minus_srun"] is None
