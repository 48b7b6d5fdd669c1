"""Reports on host lists, requests, variables and steps: their inputs, and what Slurm gets from us."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.nodelist import compress, expand
from miles_hpc.cluster.placement import place, role_srun_args, span_srun_args, step_environ
from miles_hpc.cluster.render import render_job
from miles_hpc.cluster.site import template_folders
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.control.addresses import local_addresses
from miles_hpc.control.tcp import parse_address
from miles_hpc.core.config import RunConfig, SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import is_split, roles_in_use, spans
from miles_hpc.core.load import validate
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_gpu_run, make_run, make_site
from tests.unit.test_site_files import SLURM_SITES

PATHS = RunPaths(Path("/runs/r"))
LAYOUTS = ("hetjob", "hetjob_span", "split", "split_span")
#: A batch script's own view of an allocation whose names are compact lists, as in the reports.
ALLOCATION = {
    "SLURM_JOB_ID": "4711",
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST": "n[008-011],m[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[008-009]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[010-011]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "m1",
}
LARGE = {**ALLOCATION, **{f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"x{i}[01-40]" for i in range(3)}}


def steps(run: RunConfig, site: SiteConfig) -> Iterator[list[str]]:
    """Every srun of a run, word by word, without its programs."""
    made = place(run, site, ALLOCATION)
    used = roles_in_use(run)
    if spans(made.layout):
        yield span_srun_args(run, site, {role: [] for role in ("", *used)}, name="all", placement=made)
        return
    for role in used:
        yield role_srun_args(run, site, role, name=role, placement=made)


# ------------------------------------------------------------------------------------------------ host lists


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("a[1-2],b3", ["a1", "a2", "b3"]),
        ("a[1-2]b[3-4],c", ["a1b3", "a1b4", "a2b3", "a2b4", "c"]),
        ("n008\nn009\n", ["n008", "n009"]),
    ],
)
def test_lists_of_the_reports(listed: str, hosts: list[str]) -> None:
    assert expand(listed) == hosts
    assert expand(compress(hosts)) == hosts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_host_is_a_name_and_not_a_piece_of_the_list(layout: str) -> None:
    made = place(make_run(f"job.layout={layout}"), make_site(), ALLOCATION)
    assert made.hosts["trainer"] == ("n008", "n009")
    assert made.hosts["rollout"] == ("n010", "n011")
    assert all("[" not in host for hosts in made.hosts.values() for host in hosts)


@pytest.mark.parametrize(
    "text", ["tcp://10.0.0.1 :80", "tcp://10.0.0.1:80 ", " tcp://10.0.0.1:80", "tcp://10.0.0.1\n:80"]
)
def test_an_address_with_a_blank_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expected tcp://address:port"):
        parse_address(text)


def test_the_host_that_called_srun_is_never_published_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "198.51.100.7")
    assert "198.51.100.7" not in local_addresses()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_only_a_task_knows_is_not_taken_from_the_batch_shell(layout: str) -> None:
    """The batch shell is task 0 of node 0: its own numbers on a command line make every task the first."""
    run = make_run(f"job.layout={layout}", "groups.trainer.ranks_per_node=2")
    for words in steps(run, make_site()):
        assert not [word for word in words if "$" in word or "NODEID" in word or "PROCID" in word]
    own = {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "1", "SLURM_STEP_ID": "9"}
    assert step_environ(own) == {}


def test_a_group_has_one_task_a_rank_or_one_a_node() -> None:
    """Never tasks that each start as many ranks as there are GPUs: 64 processes where 8 were meant."""
    site = make_site("generic_h100_ib")
    run = make_gpu_run(site)
    trainer, rollout, _ = plan_job(run, site, PATHS).components
    assert (trainer.ntasks_per_node, trainer.ntasks) == (8, 32)
    assert (rollout.ntasks_per_node, rollout.ntasks) == (1, 4)
    with pytest.raises(UserError, match="ranks_per_node = 16 but gpus_per_node = 8"):
        validate(make_gpu_run(site, "groups.trainer.ranks_per_node=16"), site)


# ------------------------------------------------------------------------------------------------ requests


@pytest.mark.parametrize("time", ["30", "1-2", "90:00", "2-00:30"])
def test_a_time_reaches_slurm_as_it_was_written(time: str) -> None:
    """What reads times is one function, and what Slurm gets is the user's own text: nothing is converted in between."""
    for component in plan_job(make_run(f"job.time={time}"), make_site(), PATHS).components:
        assert [d for d in component.directives if d.startswith("--time")] == [f"--time={time}"]


@pytest.mark.parametrize("name", SLURM_SITES)
def test_no_variable_travels_in_a_list_of_sruns(name: str) -> None:
    site = make_site(name)
    run = make_gpu_run(site, "job.time=60")
    words = [word for c in plan_job(run, site, PATHS).components for word in c.directives]
    made = place(run, site, LARGE)
    for role in roles_in_use(run):
        words += role_srun_args(run, site, role, name=role, placement=made)
    assert {word for word in words if word.startswith("--export")} == {"--export=ALL"}


def test_a_job_that_is_submitted_from_inside_one_takes_nothing_of_it(tmp_path: Path) -> None:
    """The follow-up job would inherit the CPUs, the memory and the host file of the one that submits it."""
    program = tmp_path / "sbatch"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\nenv > {tmp_path}/seen\necho 17\n")
    program.chmod(0o755)
    inherited = {
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_TRES_PER_TASK": "cpu:1",
        "SLURM_MEM_PER_NODE": "196608",
        "SLURM_HOSTFILE": "/tmp/hosts",
        "SBATCH_GRES": "gpu:4",
        "SBATCH_EXPORT": "NONE",
    }
    path = f"{tmp_path}:{os.environ['PATH']}"
    slurm = Slurm(environ={**inherited, "SLURM_CONF": "/etc/x.conf", "PATH": path, "KEPT": "yes"})
    assert slurm.submit("#!/bin/sh\n") == 17
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert not set(inherited) & set(seen)
    assert (seen["SLURM_CONF"], seen["KEPT"]) == ("/etc/x.conf", "yes")


@pytest.mark.parametrize(("layout", "tasks"), list(product(LAYOUTS, (1, 2))))
def test_every_srun_states_its_cpus_and_takes_none_from_the_batch_script(layout: str, tasks: int) -> None:
    run = make_run(f"job.layout={layout}", f"groups.trainer.ranks_per_node={tasks}", "groups.trainer.cpus_per_task=3")
    for words in steps(run, make_site()):
        parts = " ".join(words).split(" : ")
        assert all(part.count("--cpus-per-task=") == 1 for part in parts), words
    leaked = {"SLURM_CPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "cpu:1", "SRUN_CPUS_PER_TASK": "2"}
    assert step_environ({**leaked, "SLURM_MEM_PER_NODE": "196608", "SLURM_HOSTFILE": "/x", "A": "1"}) == {"A": "1"}


@pytest.mark.parametrize("option", ["--ntasks-per-gpu=1", "--gpus-per-task=1", "--gpus=8", "-G 8", "--gres=gpu:2"])
def test_a_second_family_of_gpu_request_is_refused(option: str) -> None:
    site = make_site("generic_h100_ib")
    run = make_gpu_run(site, f"job.extra_directives=['{option}']")
    with pytest.raises(UserError, match=r"asks for GPUs with --gres: set groups.<role>.gpus_per_node and take"):
        plan_job(run, site, PATHS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_the_cores_of_a_node(layout: str) -> None:
    """--cpus-per-task is a rank's share: with all cores of the node, a second rank would find none."""
    run = make_run(f"job.layout={layout}", "groups.trainer.ranks_per_node=4", "groups.trainer.cpus_per_task=18")
    trainer = plan_job(run, make_site(), PATHS).components[0]
    assert trainer.ntasks_per_node * trainer.cpus_per_task == 72
    words = next(steps(run, make_site()))
    assert {"--ntasks-per-node=4", "--cpus-per-task=18"} <= set(words)


def test_more_cores_than_a_node_has_are_refused() -> None:
    partition = SitePartition(name="p", roles=["trainer", "rollout", "sandbox"], cpus_per_node=72)
    site = SiteConfig(name="s", partitions=[partition])
    ranks = "groups.trainer.ranks_per_node=4"
    validate(make_run(ranks, "groups.trainer.cpus_per_task=18"), site)
    with pytest.raises(UserError, match="has 72 CPUs per node"):
        validate(make_run(ranks, "groups.trainer.cpus_per_task=72"), site)


def test_vista_gets_none_of_the_options_that_it_rejects() -> None:
    site = make_site("vista")
    run = make_gpu_run(site, "job.time=60")
    text = render_job(plan_job(run, site, PATHS), template_folders())
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    made = place(run, site, LARGE)
    words = [w for role in roles_in_use(run) for w in role_srun_args(run, site, role, name=role, placement=made)]
    for option in ("--gres", "--mem", "--gpus"):
        assert not [line for line in (*directives, *words) if option in line]


# ------------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_names_its_component_and_no_job(layout: str) -> None:
    """--jobid=<leader> --nodes=2 inside the batch script: "Only allocated 1 nodes asked for 2"."""
    made = list(steps(make_run(f"job.layout={layout}"), make_site()))
    assert len(made) == (1 if spans(layout) else 3)  # type: ignore[arg-type]
    for words in made:
        assert words[0] == "srun" and not [word for word in words if word.startswith("--jobid")]
        groups = [word for word in words if word.startswith("--het-group")]
        if is_split(layout):  # type: ignore[arg-type]
            assert groups == []
        else:
            assert len(groups) == words.count(":") + 1 and not [word for word in groups if "," in word]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_overlaps_and_says_what_it_needs(layout: str) -> None:
    """Since Slurm 20.11 a step takes its resources for itself, and the next one waits: "Requested nodes are busy"."""
    site = make_site("perlmutter")
    sizes = [f"groups.{role}.{key}" for role in ("trainer", "rollout") for key in ("nodes=2", "gpus_per_node=4")]
    run = make_gpu_run(site, *sizes, f"job.layout={layout}", "groups.sandbox.nodes=0")
    two = {**ALLOCATION, "SLURM_HET_SIZE": "2"}
    made = place(run, site, two)
    for role in ("trainer", "rollout"):
        words = role_srun_args(run, site, role, name=role, placement=made)
        names = {word.partition("=")[0] for word in words}
        assert {"--overlap", "--nodes", "--ntasks", "--cpus-per-task", "--gpus-per-node"} <= names


@pytest.mark.parametrize("name", SLURM_SITES)
def test_where_steps_meet_by_the_jobs_network_every_component_asks_for_it(name: str) -> None:
    site = make_site(name)
    stated = [c.directives for c in plan_job(make_gpu_run(site, "job.time=60"), site, PATHS).components]
    if site.fabric.vni_strategy == "job_vni_last":
        assert "job_vni" in site.fabric.slurm_network
    wanted = [f"--network={site.fabric.slurm_network}"] if site.fabric.slurm_network else []
    assert [[d for d in directives if d.startswith("--network")] for directives in stated] == [wanted] * len(stated)
