"""Hosts of roles and srun command lines, from the environment that a real het job of 2+2+1 nodes had."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.placement import het_group_hosts, role_environ, role_of_node, role_srun_args, step_environ
from miles_hpc.core.config import SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from tests.unit.runs import make_run, make_site

ENVIRON = {
    "PATH": "/usr/bin",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "t[1-2]",
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "t[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "r[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "s1",
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_NNODES": "2",
    "SLURM_CPUS_PER_TASK": "48",
    "SLURM_TRES_PER_TASK": "cpu:48",
    "SLURM_MEM_PER_NODE": "196608",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_HOSTFILE": "/tmp/hosts",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_OPEN_MODE": "t",
    "SLURMD_NODENAME": "r2",
}


def test_hosts_of_roles() -> None:
    assert het_group_hosts(ENVIRON) == {"trainer": ["t1", "t2"], "rollout": ["r1", "r2"], "sandbox": ["s1"]}
    two = {**ENVIRON, "SLURM_HET_SIZE": "2"}
    assert het_group_hosts(two)["sandbox"] == []


def test_outside_a_het_job() -> None:
    with pytest.raises(UserError, match=r"SLURM_JOB_NODELIST_HET_GROUP_0 is not set"):
        het_group_hosts({})


def test_role_of_this_node() -> None:
    assert role_of_node(ENVIRON) == "rollout"
    with pytest.raises(UserError, match=r"node 'x9' is in no het group"):
        role_of_node({**ENVIRON, "SLURMD_NODENAME": "x9"})


def test_srun_of_a_whole_role() -> None:
    run = make_run("groups.trainer.ranks_per_node=2", "groups.trainer.cpus_per_task=3")
    args = role_srun_args(run, make_site(), "trainer", name="trainer-1", environ=ENVIRON, logs=Path("/run/logs"))
    assert args == [
        "srun",
        "--het-group=0",
        "--job-name=trainer-1",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
        "--distribution=block",
        "--overlap",
        "--mpi=pmi2",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
        "--input=none",
        "--output=/run/logs/trainer-1-%t.log",
        "--open-mode=append",
    ]


def test_srun_of_one_host_of_a_role() -> None:
    args = role_srun_args(make_run(), make_site(), "rollout", name="rollout-r2", hosts=["r2"], environ=ENVIRON)
    assert "--het-group=1" in args
    assert "--nodelist=r2" in args
    assert "--overlap" in args
    assert ("--nodes=1" in args, "--ntasks=1" in args) == (True, True)
    assert ("--mpi=none" in args, "--kill-on-bad-exit=0" in args) == (True, True)
    assert not any(arg.startswith("--output") for arg in args)


def test_gpus_and_memory_are_stated_on_the_step() -> None:
    site = SiteConfig(
        name="g",
        mpi="pmix",
        partitions=[SitePartition(name="p", roles=["trainer", "rollout"], gres="h100", gpus_per_node=8)],
    )
    run = make_run("groups.rollout.gpus_per_node=8", "groups.rollout.mem=200G", "groups.sandbox.nodes=0")
    args = role_srun_args(run, site, "rollout", name="r", environ=ENVIRON)
    assert "--gres=gpu:h100:8" in args
    assert "--mem=200G" in args
    assert "--mpi=pmix" in role_srun_args(run, site, "trainer", name="t", environ=ENVIRON)
    plain = role_srun_args(run, msgspec.structs.replace(site, gpu_request="none"), "rollout", name="r", environ=ENVIRON)
    assert not any("gpu" in arg for arg in plain)


@pytest.mark.parametrize("hosts", [["t1"], ["r1", "r3"], []])
def test_hosts_must_be_the_roles_own(hosts: list[str]) -> None:
    with pytest.raises(UserError, match=r"step 'x': hosts .* are not in the rollout group r\[1-2\]"):
        role_srun_args(make_run(), make_site(), "rollout", name="x", hosts=hosts, environ=ENVIRON)


def test_each_role_has_the_settings_of_its_own_width() -> None:
    site = msgspec.structs.replace(
        make_site(),
        env={"BOTH": "site"},
        env_single_node={"NCCL_NET": "Socket", "ONE": "1"},
        env_multi_node={"NCCL_NET": "OFI", "MANY": "1"},
    )
    run = make_run("groups.trainer.nodes=2", "groups.rollout.nodes=1")
    widest = {**ENVIRON, "BOTH": "site", "NCCL_NET": "OFI", "MANY": "1", "OWN": "user"}
    ours = ("BOTH", "NCCL_NET", "ONE", "MANY", "OWN", "SLURM_NTASKS")
    trainer, rollout = (
        {key: value for key, value in role_environ(widest, run, site, role).items() if key in ours}
        for role in ("trainer", "rollout")
    )
    assert trainer == {"BOTH": "site", "NCCL_NET": "OFI", "MANY": "1", "OWN": "user"}
    assert rollout == {"BOTH": "site", "NCCL_NET": "Socket", "ONE": "1", "OWN": "user"}


def test_step_inputs_do_not_leak_into_other_components() -> None:
    kept = step_environ(ENVIRON)
    assert set(kept) == {
        "PATH",
        "SLURM_CONF",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_HET_SIZE",
        "SLURM_JOB_NODELIST_HET_GROUP_0",
        "SLURM_JOB_NODELIST_HET_GROUP_1",
        "SLURM_JOB_NODELIST_HET_GROUP_2",
        "SLURMD_NODENAME",
    }
