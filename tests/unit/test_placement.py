"""Hosts of roles and srun command lines, from the environments that real jobs of 2+2+1 nodes had."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.placement import (
    Placement,
    place,
    role_environ,
    role_of_node,
    role_srun_args,
    span_srun_args,
    step_environ,
)
from miles_hpc.core.config import SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.site import SiteFabric
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
    "SRUN_CPUS_PER_TASK": "48",
    "SBATCH_GRES": "gpu:4",
    "SLURM_JOB_GPUS": "0,1",
    "SLURMD_NODENAME": "r2",
}


SPLIT = {"SLURM_JOB_ID": "4", "SLURM_JOB_NODELIST": "a[1-3],b[1-3]", "SLURMD_NODENAME": "b1", "SLURM_NTASKS": "6"}


def placed(*overrides: str, environ: dict[str, str] = ENVIRON) -> Placement:
    return place(make_run(*overrides), make_site(), environ)


def test_hosts_of_roles() -> None:
    assert placed().hosts == {"trainer": ("t1", "t2"), "rollout": ("r1", "r2"), "sandbox": ("s1",)}
    two = {**ENVIRON, "SLURM_HET_SIZE": "2"}
    made = placed("groups.sandbox.nodes=0", environ=two)
    assert (made.hosts["sandbox"], made.whole, set(made.spares.values())) == ((), True, {()})


def test_nodes_of_a_split_job_go_to_roles_in_order_and_the_rest_is_spare() -> None:
    made = placed("job.layout=split", "groups.trainer.spare_nodes=1", environ=SPLIT)
    assert made.hosts == {"trainer": ("a1", "a2"), "rollout": ("a3", "b1"), "sandbox": ("b2",)}
    assert made.spares == {"trainer": ("b3",), "rollout": ("b3",), "sandbox": ("b3",)}
    assert role_of_node(made, SPLIT) == "rollout"


def test_a_component_keeps_its_spares_for_its_role() -> None:
    made = placed("groups.trainer.nodes=1", "groups.trainer.spare_nodes=1")
    assert (made.hosts["trainer"], made.spares["trainer"], made.spares["rollout"]) == (("t1",), ("t2",), ())
    args = role_srun_args(make_run("groups.trainer.nodes=1"), make_site(), "trainer", name="x", placement=made)
    assert "--nodelist=t1" in args
    after, spare = made.replaced("trainer", "t1")
    assert (after.hosts["trainer"], spare, after.spares["trainer"], after.whole) == (("t2",), "t2", (), False)
    rest, none = after.replaced("rollout", "r1")
    assert (rest.hosts["rollout"], none) == (("r2",), None)


@pytest.mark.parametrize(
    ("overrides", "environ", "message"),
    [
        ([], {}, r"SLURM_JOB_NODELIST_HET_GROUP_0 is not set"),
        (["job.layout=split"], {}, r"SLURM_JOB_NODELIST is not set"),
        (["groups.rollout.nodes=3"], ENVIRON, r"role 'rollout' needs 3 nodes, and 2 are left"),
        (["job.layout=split", "groups.sandbox.nodes=3"], SPLIT, r"role 'sandbox' needs 3 nodes, and 2 are left"),
    ],
)
def test_allocations_that_do_not_fit(overrides: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        placed(*overrides, environ=environ)


def test_role_of_this_node() -> None:
    assert role_of_node(placed(), ENVIRON) == "rollout"
    with pytest.raises(UserError, match=r"node 'x9' has no role"):
        role_of_node(placed(), {**ENVIRON, "SLURMD_NODENAME": "x9"})


def test_srun_of_a_whole_role() -> None:
    run = make_run("groups.trainer.ranks_per_node=2", "groups.trainer.cpus_per_task=3")
    args = role_srun_args(run, make_site(), "trainer", name="trainer-1", placement=placed(), logs=Path("/run/logs"))
    assert args == [
        "srun",
        "--mpi=pmi2",
        "--job-name=trainer-1",
        "--distribution=block",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
        "--input=none",
        "--output=/run/logs/trainer-1-%t.log",
        "--open-mode=append",
        "--het-group=0",
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=3",
    ]


def test_a_step_over_components_states_everything_for_each() -> None:
    run = make_run("job.layout=hetjob_span", "groups.trainer.ranks_per_node=2", "groups.rollout.cpus_per_task=4")
    programs = {"trainer": ["a", "t"], "rollout": ["a", "r"], "sandbox": ["a", "s"]}
    args = span_srun_args(run, make_site(), programs, name="all-1", placement=placed("job.layout=hetjob_span"))
    parts, part = [], []
    for word in [*args[2:], ":"]:
        if word == ":":
            parts, part = [*parts, part], []
        else:
            part.append(word)
    assert args[:2] == ["srun", "--mpi=pmi2"]
    assert [part[-2:] for part in parts] == [["a", "t"], ["a", "r"], ["a", "s"]]
    shapes = [[word for word in part if word.startswith(("--het-group", "--ntasks=", "--cpus"))] for part in parts]
    assert shapes == [
        ["--het-group=0", "--ntasks=4", "--cpus-per-task=1"],
        ["--het-group=1", "--ntasks=2", "--cpus-per-task=4"],
        ["--het-group=2", "--ntasks=1", "--cpus-per-task=1"],
    ]
    for part in parts:
        assert {"--job-name=all-1", "--overlap", "--kill-on-bad-exit=0", "--distribution=block"} <= set(part)


def test_a_step_over_a_split_job_has_the_same_on_every_node() -> None:
    overrides = ("job.layout=split_span", "groups.trainer.ranks_per_node=2", "groups.rollout.cpus_per_task=5")
    made = placed("job.layout=split_span", environ=SPLIT)
    args = span_srun_args(make_run(*overrides), make_site(), {"": ["a"]}, name="all-1", placement=made)
    assert args[-1] == "a"
    shape = ["--nodes=5", "--ntasks=10", "--ntasks-per-node=2", "--cpus-per-task=3", "--nodelist=a[1-3],b[1-2]"]
    assert args[-6:-1] == shape
    assert not any(word.startswith("--het-group") for word in args)


def test_srun_of_one_host_of_a_role() -> None:
    args = role_srun_args(make_run(), make_site(), "rollout", name="rollout-r2", hosts=["r2"], placement=placed())
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
    made = place(run, site, {**ENVIRON, "SLURM_HET_SIZE": "2"})
    args = role_srun_args(run, site, "rollout", name="r", placement=made)
    assert "--gres=gpu:h100:8" in args
    assert "--mem=200G" in args
    assert "--mpi=pmix" in role_srun_args(run, site, "trainer", name="t", placement=made)
    none = msgspec.structs.replace(site, gpu_request="none")
    plain = role_srun_args(run, none, "rollout", name="r", placement=made)
    assert not any("gpu" in arg for arg in plain)


def test_on_slingshot_no_step_is_started_without_an_mpi_plugin() -> None:
    """Its children send over CXI, and what --mpi=none started had no virtual network (prrte#2004)."""
    site = msgspec.structs.replace(make_site(), fabric=SiteFabric(kind="cxi"))
    for role in ("trainer", "rollout", "sandbox"):
        assert "--mpi=pmi2" in role_srun_args(make_run(), site, role, name="x", placement=placed())
    assert "--mpi=none" in role_srun_args(make_run(), make_site(), "sandbox", name="x", placement=placed())


@pytest.mark.parametrize("hosts", [["t1"], ["r1", "r3"], []])
def test_hosts_must_be_the_roles_own(hosts: list[str]) -> None:
    with pytest.raises(UserError, match=r"step 'x': hosts .* are not in the rollout group r\[1-2\]"):
        role_srun_args(make_run(), make_site(), "rollout", name="x", hosts=hosts, placement=placed())


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
        {key: value for key, value in role_environ(widest, run, site, (role,)).items() if key in ours}
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
