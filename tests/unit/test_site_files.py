"""The shipped sites, in a table: what a 32 + 32 GPU run asks for there, and that nothing forbidden is stated."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from miles_hpc.cluster.job_plan import JobPlan, plan_job
from miles_hpc.cluster.placement import place, role_srun_args
from miles_hpc.cluster.site import data_folder
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import site_names, validate
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site_rules import forbidden_options, option_name
from tests.unit.runs import make_gpu_run, make_site


class Expected(NamedTuple):
    """What the sources say of a site's jobs. `trainer` and `rollout` are the options that ask for GPUs."""

    nodes: int
    trainer: set[str]
    rollout: set[str]
    stated: frozenset[str] | set[str] = frozenset()
    absent: frozenset[str] | set[str] = frozenset()


BY_NODE = {"--gpus-per-node=4"}
GRES = {"--gres=gpu:4"}
GRES_UNBOUND = {*GRES, "--gpu-bind=none"}
EXPECTED = {
    "clariden": Expected(8, {"--gpus-per-task=1"}, {"--gpus-per-task=4"}, absent={"--gres", "--gpus-per-node"}),
    "deltaai": Expected(8, BY_NODE, BY_NODE),
    "frontier": Expected(
        4,
        {"--gpus-per-node=8"},
        {"--gpus-per-node=8"},
        stated={"--network=single_node_vni,job_vni,disable_rdzv_get", "--no-requeue"},
    ),
    "generic_gb200_nvl72": Expected(8, BY_NODE, BY_NODE, absent={"--segment"}),
    "generic_gb300_nvl72": Expected(8, BY_NODE, BY_NODE, stated={"--requeue"}, absent={"--segment"}),
    "generic_h100_ib": Expected(4, {"--gres=gpu:h100:8"}, {"--gres=gpu:h100:8"}),
    "isambard_ai": Expected(8, BY_NODE, BY_NODE),
    "jupiter": Expected(8, GRES_UNBOUND, GRES_UNBOUND),
    "juwels_booster": Expected(8, GRES_UNBOUND, GRES_UNBOUND),
    "leonardo": Expected(8, GRES, GRES, stated={"--account=project"}),
    "lumi_g": Expected(4, {"--gpus-per-node=8"}, {"--gpus-per-node=8"}, stated={"--no-requeue"}),
    "mn5_acc": Expected(8, GRES, GRES, stated={"--qos=acc_ehpc"}, absent={"--mem"}),
    "perlmutter": Expected(
        8,
        {*BY_NODE, "--gpu-bind=none"},
        {*BY_NODE, "--gpu-bind=none"},
        stated={"--qos=regular", "--constraint=gpu", "--network=job_vni", "--requeue"},
        absent={"--partition"},
    ),
    "slurm_box": Expected(32, set(), set()),
    "vista": Expected(
        32,
        set(),
        set(),
        stated={"--nodes=32", "--time=01:00:00"},
        absent={"--gres", "--gpus-per-task", "--mem", "--nodelist", "--exclude", "--export"},
    ),
}
SLURM_SITES = sorted(name for name in site_names([data_folder("site_configs")]) if make_site(name).scheduler == "slurm")


def plan(name: str, *overrides: str) -> JobPlan:
    site = make_site(name)
    run = make_gpu_run(site, *overrides)
    validate(run, site)
    return plan_job(run, site, RunPaths(Path("/runs/tiny")))


def gpu_options(directives: tuple[str, ...]) -> set[str]:
    return {d for d in directives if d.startswith(("--gres", "--gpu"))}


def test_the_table_has_every_site() -> None:
    assert set(EXPECTED) == set(SLURM_SITES)


@pytest.mark.parametrize("name", SLURM_SITES)
def test_a_run_of_32_and_32_gpus(name: str) -> None:
    expected, site = EXPECTED[name], make_site(name)
    made = plan(name)
    trainer, rollout, sandbox = made.components
    assert (trainer.nodes, rollout.nodes, sandbox.nodes) == (expected.nodes, expected.nodes, 1)
    assert gpu_options(trainer.directives) == expected.trainer
    assert gpu_options(rollout.directives) == expected.rollout
    assert gpu_options(sandbox.directives) == set()
    assert expected.stated <= set(trainer.directives)
    for component in made.components:
        names = [option_name(directive) for directive in component.directives]
        assert len(names) == len(set(names))
        assert not (forbidden_options(site) | expected.absent) & set(names)
        assert set(site.sbatch.required) <= set(names)


@pytest.mark.parametrize("name", SLURM_SITES)
def test_steps_ask_as_the_job_does(name: str) -> None:
    site = make_site(name)
    run = make_gpu_run(site)
    environ = {"SLURM_HET_SIZE": "3"}
    environ |= {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"{role}[1-40]" for i, role in enumerate("trs")}
    for role, wanted in (("trainer", EXPECTED[name].trainer), ("rollout", EXPECTED[name].rollout)):
        arguments = role_srun_args(run, site, role, name="step", placement=place(run, site, environ))
        assert gpu_options(tuple(arguments)) == wanted
        assert not {"--gres", "--gpus-per-task", "--mem"} & forbidden_options(site) & set(map(option_name, arguments))


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("vista", "groups.trainer.mem=8G", "groups.trainer: mem = \"8G\": site 'vista' takes no memory request"),
        ("vista", "job.extra_directives=['--gres=gpu:1']", "site 'vista' forbids --gres: take '--gres=gpu:1' out"),
        ("vista", "job.extra_directives=['--gre=gpu:1']", "site 'vista' forbids --gres"),
        ("vista", "job.extra_directives=['--mem=1G']", "site 'vista' forbids --mem: take '--mem=1G' out"),
        ("vista", "job.extra_directives=['-w c1']", "site 'vista' forbids --nodelist: take '-w c1' out"),
        ("vista", "job.extra_directives=['-wc1']", "site 'vista' forbids --nodelist"),
        ("vista", "job.extra_directives=['--exclude=c1']", "site 'vista' forbids --exclude"),
        ("vista", "job.extra_directives=['--export=ALL']", "site 'vista' forbids --export"),
        ("vista", "groups.trainer.nodes=65", "nodes = 65: partition 'gh' of site 'vista' allows 64"),
        ("vista", "groups.trainer.partition=gh-dev", "nodes = 32: partition 'gh-dev' of site 'vista' allows 8"),
        (
            "clariden",
            "job.extra_directives=['--gres=gpu:4']",
            "'clariden' asks for GPUs with --gpus-per-task: set groups.",
        ),
        ("leonardo", "job.extra_directives=['--gpus-per-node=4']", "site 'leonardo' asks for GPUs with --gres: set"),
        ("jupiter", "job.extra_directives=['-G 4']", "site 'jupiter' asks for GPUs with --gres"),
        ("perlmutter", "job.qos=", "job.qos: site 'perlmutter' wants --qos in every job: set it (regular, debug, "),
        (
            "perlmutter",
            "job.qos=debug",
            "site 'perlmutter' forbids jobs that follow each other in 'debug': set job.max_all",
        ),
        ("perlmutter", "job.qos=interactive", "nodes = 8: QOS 'interactive' of site 'perlmutter' allows 4"),
        ("mn5_acc", "groups.trainer.cpus_per_task=14", "cpus_per_task = 14: site 'mn5_acc' wants 20 CPUs a GPU: set"),
        ("mn5_acc", "groups.rollout.cpus_per_task=57", "set it to 80 or more"),
        ("mn5_acc", "groups.rollout.mem=100G", "takes no memory request"),
        ("mn5_acc", "job.qos=", "job.qos: site 'mn5_acc' wants --qos"),
        ("leonardo", "job.account=", "job.account: site 'leonardo' refuses jobs without an account"),
        ("clariden", "groups.trainer.ranks_per_node=3", "takes GPUs per task: expected a multiple of ranks_per_node"),
        ("frontier", "groups.trainer.gpus_per_node=9", "has 8 GPUs per node"),
        ("frontier", "groups.trainer.partition=extended", "partition 'extended' of site 'frontier' runs 1 of a user's"),
    ],
)
def test_what_a_site_refuses_is_one_line(name: str, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(name, override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_on_running_jobs_count_components() -> None:
    debug = ("job.qos=debug", "job.max_allocations=1")
    with pytest.raises(UserError, match=r"QOS 'debug' of site 'perlmutter' runs 2 of a user's jobs at once, and a het"):
        plan("perlmutter", *debug)
    plan("perlmutter", *debug, "groups.sandbox.nodes=0")


def test_options_that_only_begin_alike_are_others() -> None:
    plan("leonardo", "job.extra_directives=['--gres=tmpfs:10g', '--gpu-freq=low']")
    plan("vista", "job.extra_directives=['--exclusive', '--mem-bind=local', '--nice=5', '-d singleton']")
