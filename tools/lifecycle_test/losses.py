"""Nodes that lose power, a file system that is full, a slurmctld that doesn't answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from miles_hpc.core.errors import MilesError
from tools.kill_test import rl_step
from tools.lifecycle_test.stage import FIVE, Stage


def power(role: str) -> Callable[[Stage], None]:
    """Cut the power of a role's last node; `batch` is the first node of the job."""

    def scenario(stage: Stage) -> None:
        stage.submit()
        stage.reach(8)
        hosts = stage.notes("allocation_start")[0]["hosts"]
        node = hosts["trainer"][0] if role == "batch" else hosts[role][-1]
        began = time.time()
        stage.box.kill_node(node)
        stage.until(lambda: len(stage.notes("allocation_start")) >= 2, "the next allocation", 120)
        stage.seen["restarted_s"] = round(stage.notes("allocation_start")[1]["t"] - began, 1)
        stage.seen["cut"] = node
        stage.complete(240)
        again = stage.notes("allocation_start")[1]["hosts"]
        if any(node in some for some in again.values()):
            raise MilesError(f"{node} has no power and was given work: {again}")

    return scenario


def spare(stage: Stage) -> None:
    stage.submit(**{"groups.trainer.spare_nodes": "1", "groups.rollout.spare_nodes": "1", "groups.sandbox.nodes": "2"})
    stage.reach(8)
    hosts = stage.notes("allocation_start")[0]["hosts"]
    for role in ("rollout", "trainer"):
        node, step = hosts[role][-1], rl_step(stage.run_dir)
        began = time.time()
        stage.box.kill_node(node)
        stage.until(lambda n=node: [v for v in stage.notes("node_failed") if v["peer"] == n], f"{node} given up", 60)
        stage.until(lambda s=step: rl_step(stage.run_dir) >= s + 4, "steps after the cut", 120)
        stage.seen[f"{role}_replaced_s"] = round(stage.notes("node_failed")[-1]["t"] - began, 1)
    stage.complete(240)
    if len(stage.outcomes()) != 1:
        raise MilesError(f"{len(stage.outcomes())} allocations: spares should have kept the first")


def two_lost(stage: Stage) -> None:
    """A trainer's and a rollout's node lose power at the same moment, without spares."""
    stage.submit()
    stage.reach(8)
    hosts = stage.notes("allocation_start")[0]["hosts"]
    cut = [hosts["rollout"][-1], hosts["trainer"][-1]]
    began = time.time()
    for node in cut:
        stage.box.kill_node(node)
    stage.until(lambda: len(stage.notes("allocation_start")) >= 2, "the next allocation", 120)
    stage.seen |= {"restarted_s": round(stage.notes("allocation_start")[1]["t"] - began, 1), "cut": cut}
    stage.complete(240)
    for again in stage.notes("allocation_start")[1:]:
        if given := [node for some in again["hosts"].values() for node in some if node in cut]:
            raise MilesError(f"{given} have no power and were given work")


def two_spares(stage: Stage) -> None:
    """The same with a spare for each: the allocation goes on."""
    stage.submit(**{"groups.trainer.spare_nodes": "1", "groups.rollout.spare_nodes": "1", "groups.sandbox.nodes": "2"})
    stage.reach(8)
    hosts = stage.notes("allocation_start")[0]["hosts"]
    cut, step, began = [hosts["rollout"][-1], hosts["trainer"][-1]], rl_step(stage.run_dir), time.time()
    for node in cut:
        stage.box.kill_node(node)
    stage.until(lambda: {v["peer"] for v in stage.notes("node_failed")} >= set(cut), "both nodes given up", 60)
    stage.until(lambda: rl_step(stage.run_dir) >= step + 4, "steps after the cut", 120)
    stage.seen["replaced_s"] = round(stage.notes("node_failed")[-1]["t"] - began, 1)
    stage.complete(240)
    if len(stage.outcomes()) != 1:
        raise MilesError(f"{len(stage.outcomes())} allocations: spares should have kept the first")


def orphan(stage: Stage) -> None:
    stage.submit(**{"groups.trainer.spare_nodes": "1", "groups.sandbox.nodes": "2"})
    stage.reach(8)
    began = time.time()
    stage.box.kill_node(stage.notes("allocation_start")[0]["hosts"]["trainer"][0])
    stage.until(lambda: len(stage.notes("allocation_start")) >= 2, "the next allocation", 180)
    stage.seen["restarted_s"] = round(stage.notes("allocation_start")[1]["t"] - began, 1)
    stage.complete(240)


def slurmctld(stage: Stage) -> None:
    """It stops answering for a while, and later it's dead while the allocation ends."""
    stage.submit(**FIVE | {"job.time": "00:01:30"})
    stage.reach(4)
    pid = stage.box.daemons()["slurmctld"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        before = rl_step(stage.run_dir)
        time.sleep(15)
        stage.seen["steps_while_stopped"] = rl_step(stage.run_dir) - before
    finally:
        os.kill(pid, signal.SIGCONT)
    if not stage.seen["steps_while_stopped"]:
        raise MilesError("the run stood still while slurmctld did")
    stage.until(lambda: stage.notes("drain"), "the end of the first allocation", 120)
    os.kill(pid, signal.SIGKILL)
    time.sleep(20)
    stage.box.up()
    stage.complete(300)
    stage.seen["allocations"] = len(stage.outcomes())
    if stage.seen["allocations"] < 2:
        raise MilesError("one allocation: the run was too short for the test")


def full_disk(stage: Stage) -> None:
    """The run directory is a file system of its own, which something else fills up."""
    stage.run_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(stage.run_dir)], check=True)
    filler = stage.run_dir / "sessions" / "filler"
    try:
        stage.submit(**{"rollout.n_steps": "60"})
        stage.reach(8)
        filler.parent.mkdir(exist_ok=True)
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            except OSError:
                pass
        stage.seen["full_at_step"] = rl_step(stage.run_dir)
        time.sleep(20)
        listing = subprocess.run(
            [sys.executable, "-P", "-m", "tools.audit_run", str(stage.run_dir), "--json", "--strict"],
            capture_output=True,
            text=True,
            check=False,
        )
        while_full = json.loads(listing.stdout)
        if while_full["twice"] or while_full["lost"]:
            raise MilesError(f"while full: {listing.stdout[:1500]}")
        filler.unlink()
        stage.until(
            lambda: stage.notes("run_complete") or not stage.box.run("squeue", "-h", "-a", "-o", "%i").split(),
            "the run's end",
            240,
        )
        if not stage.notes("run_complete"):
            stage.seen["stopped"] = stage.outcomes()[-1]["reason"]
            stage.cli("resume", str(stage.run_dir))
        stage.complete(240)
        stage.seen["audit"] = stage.audit()
    finally:
        stage.box.run("scancel", "--user", str(os.getuid()))
        deadline = time.monotonic() + 60
        while stage.leftovers() and time.monotonic() < deadline:
            time.sleep(0.5)
        subprocess.run(["umount", "--lazy", str(stage.run_dir)], check=True)
