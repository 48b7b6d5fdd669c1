"""The doctor's way out to the machine, on the real one: commands that hang, probes of file systems, ports, limits."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.cluster.preflight import probe
from miles_hpc.cluster.preflight.catalogue import select
from miles_hpc.cluster.preflight.contract import Check, Context, Finding, fine, skip
from miles_hpc.cluster.preflight.machine import LocalMachine
from miles_hpc.cluster.preflight.runner import Result, run_checks, worst
from tests.unit.runs import make_site


@pytest.fixture
def machine() -> LocalMachine:
    return LocalMachine()


def test_a_command_that_hangs_ends_with_what_it_started(machine: LocalMachine, tmp_path: Path) -> None:
    begun = time.monotonic()
    pids = tmp_path / "pids"
    script = f"sleep 300 & echo $! > {pids}; wait"
    output = machine.run("sh", "-c", script, timeout_s=0.5)
    assert (output.timed_out, output.problem) == (True, f"sh -c {script}: no answer within 0 s")
    assert time.monotonic() - begun < 5.0
    child = Path("/proc") / pids.read_text().strip() / "stat"
    end = time.monotonic() + 5.0
    # Killed with its parent; whoever reaps orphans here may take its time.
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
        assert time.monotonic() < end, "the grandchild lives on"
        time.sleep(0.05)


def test_commands_that_fail_or_are_not_there(machine: LocalMachine) -> None:
    assert machine.run("no-such-program-here").missing
    output = machine.run("sh", "-c", "echo first >&2; exit 3")
    assert (output.code, output.problem) == (3, "sh -c echo first >&2; exit 3: first")
    assert machine.run("sh", "-c", "exit 4").problem == "sh -c exit 4: exit code 4"
    assert machine.run("echo", "hello").stdout == "hello\n"


def test_the_environment_is_the_one_given() -> None:
    machine = LocalMachine({"PATH": "/usr/bin:/bin", "SLURMD_NODENAME": "n7", "ONLY": "this"})
    assert machine.host == "n7"
    assert "ONLY=this" in machine.run("env").stdout
    assert "HOME=" not in machine.run("env").stdout


def test_ports_and_limits(machine: LocalMachine) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert machine.can_bind(port) == "Address already in use"
    assert machine.can_bind(port) == ""
    soft, hard = machine.limit("nofile")
    assert 0 < soft <= hard


def test_flock_is_really_tried(machine: LocalMachine, tmp_path: Path) -> None:
    for folder in (tmp_path / "not" / "there" / "yet", Path("/dev/shm")):
        asked = machine.probe("flock", str(folder))
        assert asked.value == {"works": True, "saw": "a second process is kept out"}, asked.problem
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_lets_others_in_is_seen(
    machine: LocalMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_lock(*_: object) -> None:
        """As a file system whose locks do nothing."""

    monkeypatch.setattr(probe.fcntl, "flock", no_lock)
    assert probe.flock(str(tmp_path)) == {"works": False, "saw": "a second process is let in"}
    monkeypatch.setattr(probe.fcntl, "flock", _refused)
    assert probe.flock(str(tmp_path)) == {"works": False, "saw": "flock is refused: Function not implemented"}


def _refused(*_: object) -> None:
    raise OSError(38, os.strerror(38))


def test_places(machine: LocalMachine, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    (one, other) = machine.probe("place", str(tmp_path / "link" / "new"), str(tmp_path)).value
    assert (one["real"], one["kind"], one["exists"], one["writable"]) == ("/dev/shm", "tmpfs", False, True)
    assert (other["real"], other["exists"]) == (os.path.realpath(tmp_path), True)
    assert other["inode"] == tmp_path.stat().st_ino
    assert 0 < one["free_bytes"] <= one["total_bytes"]


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.key"
    context = Context(site=make_site(), run_dir=tmp_path, environ=dict(os.environ))
    (check,) = select(["secret"])
    assert [r.finding.status for r in run_checks([check], LocalMachine(), context)] == ["skip"]
    secret.touch(mode=0o600)
    assert [r.finding.status for r in run_checks([check], LocalMachine(), context)] == ["ok"]
    secret.chmod(0o644)
    (result,) = run_checks([check], LocalMachine(), context)
    assert (result.finding.status, result.finding.do) == ("FAIL", f"chmod 600 {secret}")


def test_file_time_on_this_host(machine: LocalMachine, tmp_path: Path) -> None:
    assert abs(machine.probe("file_time", str(tmp_path)).value) < 1.0


def test_packages_of_an_interpreter(machine: LocalMachine) -> None:
    found = machine.probe("packages", "msgspec", "no-such-package", python=sys.executable).value
    assert list(found) == ["msgspec"]
    assert machine.probe("packages", "msgspec", python="/no/such/python").problem
    assert machine.probe("package_files", "msgspec", r"\.py$").value.count("__init__.py") == 1


def test_libraries_and_what_they_say_of_themselves(machine: LocalMachine, tmp_path: Path) -> None:
    library = tmp_path / "libnccl-net.so"
    library.write_bytes(b"\0Initializing aws-ofi-nccl 1.9.2-aws\0")
    (tmp_path / "libnccl-net.so.txt").touch()
    found = machine.probe("libraries", r"libnccl-net\.so", "/no/such/folder", str(tmp_path)).value
    assert found == [str(library)]
    assert machine.probe("search_bytes", str(library), r"aws-ofi-nccl (\d[\w.-]*)").value == "1.9.2-aws"
    assert "No such file" in machine.probe("search_bytes", str(tmp_path / "gone"), "x").problem


def test_logs_and_steps_of_the_newest_attempt(machine: LocalMachine, tmp_path: Path) -> None:
    assert machine.probe("newest_logs", str(tmp_path)).value == []
    for attempt, text in (("0001", "NCCL INFO old"), ("0002", "NCCL INFO new\nother")):
        logs = tmp_path / "attempts" / attempt / "logs"
        logs.mkdir(parents=True)
        (logs / "trainer.log").write_text(text + "\n")
    newest = machine.probe("newest_logs", str(tmp_path)).value
    assert newest == [str(tmp_path / "attempts" / "0002" / "logs" / "trainer.log")]
    assert machine.probe("lines", "NCCL", *newest).value == ["NCCL INFO new"]
    events = tmp_path / "events"
    events.mkdir()
    lines = [{"kind": "metric", "attempt": a, "step": s} for a, s in ((1, 1), (2, 2), (2, 3), (2, 3))]
    lines.append({"kind": "span", "attempt": 2, "step": 9})
    lines.append({"kind": "metric", "attempt": 2, "step": 0, "values": {"eval/shell": 0.5}})  # trained nothing
    (events / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + '\n{"kind":"metric","att')
    assert machine.probe("trained_steps", str(tmp_path)).value == 2


def test_a_file_system_that_hangs_is_named(tmp_path: Path) -> None:
    """A fifo stands for it: whoever opens it waits for a writer."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    begun = time.monotonic()
    asked = LocalMachine().probe("search_bytes", str(fifo), "x", timeout_s=0.5)
    assert asked.timed_out
    assert time.monotonic() - begun < 5.0


# ------------------------------------------------------------------------------------------------ running them


def check(name: str, look: object) -> Check:
    return Check(name=name, why="a reason to look at it", source="a test", look=look)  # type: ignore[arg-type]


def test_a_check_that_breaks_or_hangs_hides_no_other(machine: LocalMachine) -> None:
    def broken(*_: object) -> list[Finding]:
        raise KeyError("gone")

    def hanging(*_: object) -> list[Finding]:
        time.sleep(60)
        return []

    checks = [check("hangs", hanging), check("breaks", broken), check("works", lambda *_: [fine("good")])]
    begun = time.monotonic()
    results = run_checks(checks, machine, Context(), deadline_s=1.0)
    assert time.monotonic() - begun < 5.0
    assert [(r.check, r.finding.status, r.finding.saw) for r in results] == [
        ("hangs", "FAIL", "no result within 1 s"),
        ("breaks", "warn", "the check itself broke: KeyError: 'gone'"),
        ("works", "ok", "good"),
    ]


def test_the_gravest_status_counts() -> None:
    assert worst([]) == "ok"
    assert worst([Result("a", skip("x")), Result("b", fine("y"))]) == "ok"


def test_all_checks_end_on_this_machine(tmp_path: Path) -> None:
    """Whatever they find here, none of them breaks."""
    context = Context(site=make_site("laptop"), run_dir=tmp_path, compute=True, environ=dict(os.environ))
    results = run_checks(select(), LocalMachine(), context)
    broken = [r.finding.saw for r in results if "broke" in r.finding.saw or "no result" in r.finding.saw]
    assert broken == []
    by_name = {r.check: r.finding.status for r in results}
    assert (by_name["flock"], by_name["file-systems"], by_name["slurm"]) == ("ok", "ok", "skip")
