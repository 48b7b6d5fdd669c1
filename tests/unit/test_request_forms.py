"""Requests for GPUs, CPUs and memory, complete: every form, every site and role, in the job and in its steps."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.cluster.job_plan import gpu_option, memory_option, plan_job
from miles_hpc.cluster.placement import place, role_srun_args
from miles_hpc.core.config import SiteConfig, SitePartition, SiteSbatch
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import validate
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site_rules import forbidden_options, option_name
from tests.unit.runs import make_gpu_run, make_site
from tests.unit.test_site_files import SLURM_SITES

REQUESTS = ("--gres", "--gpu", "--mem", "--cpus", "--ntasks-per")
ENVIRON = {"SLURM_HET_SIZE": "3"} | {
    f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"{role}[1-40]" for i, role in enumerate("trs")
}

#: form -> (GPUs a node, tasks a node, type) -> option
FORMS = {
    "gres": {
        (0, 1, ""): "",
        (0, 1, "h100"): "",
        (1, 1, ""): "--gres=gpu:1",
        (4, 1, ""): "--gres=gpu:4",
        (4, 4, ""): "--gres=gpu:4",
        (8, 8, "h100"): "--gres=gpu:h100:8",
    },
    "gpus-per-node": {
        (0, 1, ""): "",
        (0, 4, "a100"): "",
        (1, 1, ""): "--gpus-per-node=1",
        (4, 1, ""): "--gpus-per-node=4",
        (4, 4, ""): "--gpus-per-node=4",
        (8, 8, "h100"): "--gpus-per-node=h100:8",
    },
    "gpus-per-task": {
        (0, 1, ""): "",
        (0, 4, "gh200"): "",
        (1, 1, ""): "--gpus-per-task=1",
        (4, 1, ""): "--gpus-per-task=4",
        (4, 4, ""): "--gpus-per-task=1",
        (8, 4, "h100"): "--gpus-per-task=h100:2",
    },
    "none": {(0, 1, ""): "", (1, 1, "gh200"): "", (8, 8, ""): ""},
}


@pytest.mark.parametrize(
    ("form", "asked", "option"),
    [(form, asked, option) for form, rows in FORMS.items() for asked, option in rows.items()],
)
def test_a_form(form: str, asked: tuple[int, int, str], option: str) -> None:
    gpus, tasks, kind = asked
    site = msgspec.structs.replace(make_site(), gpu_request=form)
    assert gpu_option(site, SitePartition(name="p", roles=[], gres=kind), gpus, tasks) == option


#: site -> what trainer and rollout ask for with 32 GPUs each; the sandbox asks for one CPU and no GPU everywhere.
SITES = {
    "clariden": ("--cpus-per-task=1 --gpus-per-task=1", "--cpus-per-task=4 --gpus-per-task=4"),
    "deltaai": ("--cpus-per-task=1 --gpus-per-node=4", "--cpus-per-task=4 --gpus-per-node=4"),
    "frontier": ("--cpus-per-task=1 --gpus-per-node=8", "--cpus-per-task=8 --gpus-per-node=8"),
    "generic_gb200_nvl72": ("--cpus-per-task=1 --gpus-per-node=4", "--cpus-per-task=4 --gpus-per-node=4"),
    "generic_gb300_nvl72": ("--cpus-per-task=1 --gpus-per-node=4", "--cpus-per-task=4 --gpus-per-node=4"),
    "generic_h100_ib": ("--cpus-per-task=1 --gres=gpu:h100:8", "--cpus-per-task=8 --gres=gpu:h100:8"),
    "isambard_ai": ("--cpus-per-task=1 --gpus-per-node=4", "--cpus-per-task=4 --gpus-per-node=4"),
    "jupiter": ("--cpus-per-task=1 --gres=gpu:4 --gpu-bind=none", "--cpus-per-task=4 --gres=gpu:4 --gpu-bind=none"),
    "juwels_booster": (
        "--cpus-per-task=1 --gres=gpu:4 --gpu-bind=none",
        "--cpus-per-task=4 --gres=gpu:4 --gpu-bind=none",
    ),
    "leonardo": ("--cpus-per-task=1 --gres=gpu:4", "--cpus-per-task=4 --gres=gpu:4"),
    "lumi_g": ("--cpus-per-task=1 --gpus-per-node=8", "--cpus-per-task=8 --gpus-per-node=8"),
    "mn5_acc": ("--cpus-per-task=20 --gres=gpu:4", "--cpus-per-task=80 --gres=gpu:4"),
    "perlmutter": (
        "--cpus-per-task=1 --gpus-per-node=4 --gpu-bind=none",
        "--cpus-per-task=4 --gpus-per-node=4 --gpu-bind=none",
    ),
    "slurm_box": ("--cpus-per-task=1", "--cpus-per-task=1"),
    "vista": ("--cpus-per-task=1", "--cpus-per-task=1"),
}


@pytest.mark.parametrize(("name", "role"), list(product(SLURM_SITES, ("trainer", "rollout", "sandbox"))))
def test_a_role_at_a_site(name: str, role: str) -> None:
    site = make_site(name)
    run = make_gpu_run(site)
    (component,) = (c for c in plan_job(run, site, RunPaths(Path("/r"))).components if c.roles == (role,))
    texts = dict(zip(("trainer", "rollout"), SITES[name], strict=True)) | {"sandbox": "--cpus-per-task=1"}
    ranks = max(1, max(partition.gpus_per_node for partition in site.partitions)) if role == "trainer" else 1
    expected = [f"--ntasks-per-node={ranks}", *texts[role].split()]
    assert [d for d in component.directives if d.startswith(REQUESTS)] == expected
    # The step states the same again: it must not depend on what srun takes from the batch script's component.
    arguments = role_srun_args(run, site, role, name="step", placement=place(run, site, ENVIRON))
    assert [a for a in arguments if a.startswith(REQUESTS)] == expected


#: sbatch.mem -> (groups.*.mem) -> --mem as stated, None where the request is refused
MEMORY: dict[str, dict[str, str | None]] = {
    "unknown": {"": "", "8G": "8G", "0": "0"},
    "allowed": {"": "", "8G": "8G", "0": "0"},
    "forbidden": {"": "", "8G": None, "0": None},
    "zero": {"": "0", "0": "0", "8G": None},
}


@pytest.mark.parametrize(("rule", "asked"), [(rule, asked) for rule, row in MEMORY.items() for asked in row])
def test_memory(rule: str, asked: str) -> None:
    partition = SitePartition(name="p", roles=["trainer", "rollout", "sandbox"], gpus_per_node=4)
    site = SiteConfig(name="s", partitions=[partition], sbatch=SiteSbatch(mem=rule))  # type: ignore[arg-type]
    run = make_gpu_run(site, *(f"groups.{role}.mem={asked}" for role in ("trainer", "rollout", "sandbox")))
    expected = MEMORY[rule][asked]
    if expected is None:
        with pytest.raises(UserError, match=rf"groups.trainer: mem = \"{asked}\": site 's' "):
            validate(run, site)
        return
    validate(run, site)
    assert memory_option(site, asked) == expected
    for component in plan_job(run, site, RunPaths(Path("/r"))).components:
        stated = [d for d in component.directives if d.startswith("--mem")]
        assert stated == ([f"--mem={expected}"] if expected else [])
        arguments = role_srun_args(run, site, component.roles[0], name="step", placement=place(run, site, ENVIRON))
        assert [a for a in arguments if a.startswith("--mem")] == stated


@pytest.mark.parametrize("name", SLURM_SITES)
def test_memory_at_a_site(name: str) -> None:
    """Two sites derive memory from what else is asked for, and refuse a request; nothing is known of the others."""
    site = make_site(name)
    run = make_gpu_run(site, *(f"groups.{role}.mem=8G" for role in ("trainer", "rollout", "sandbox")))
    if name in ("mn5_acc", "vista"):
        with pytest.raises(UserError, match="takes no memory request: leave it out"):
            validate(run, site)
    else:
        validate(run, site)


@pytest.mark.parametrize(
    ("least", "gpus", "ranks", "cpus", "needed"),
    [
        (0, 4, 4, 1, 0),
        (20, 0, 1, 1, 0),  # no GPU, no rule
        (20, 4, 4, 20, 0),
        (20, 4, 4, 19, 20),
        (20, 4, 1, 80, 0),
        (20, 4, 1, 57, 80),  # 57 CPUs for 4 GPUs: "Required cpus: 80"
        (20, 4, 3, 26, 27),
        (20, 1, 1, 20, 0),
    ],
)
def test_cpus_for_gpus(least: int, gpus: int, ranks: int, cpus: int, needed: int) -> None:
    partition = SitePartition(name="p", roles=["trainer", "rollout", "sandbox"], gpus_per_node=max(gpus, 1))
    site = SiteConfig(name="s", partitions=[partition], sbatch=SiteSbatch(cpus_per_gpu_min=least))
    keys = {"gpus_per_node": gpus, "ranks_per_node": ranks, "cpus_per_task": cpus}
    run = make_gpu_run(
        site, "groups.rollout.gpus_per_node=0", *(f"groups.trainer.{key}={value}" for key, value in keys.items())
    )
    if not needed:
        validate(run, site)
        return
    with pytest.raises(UserError, match=rf"cpus_per_task = {cpus}: site 's' wants 20 CPUs a GPU: set it to {needed} "):
        validate(run, site)


#: What each site's sources forbid and require. A site that isn't here forbids and requires nothing that is known.
FORBIDDEN = {
    "mn5_acc": {"--mem"},
    "vista": {"--gres", "--gpus-per-task", "--mem", "--nodelist", "--exclude", "--export"},
}
REQUIRED = {
    "mn5_acc": {"--qos"},
    "perlmutter": {"--qos"},
    "vista": {"--nodes", "--ntasks-per-node", "--time"},
}
#: Other spellings that sbatch takes for an option: its beginning, and one letter.
SPELLINGS = {
    "--gres": ["--gre=gpu:1"],
    "--gpus-per-task": ["--gpus-per-t=1"],
    "--mem": ["--mem 8G"],
    "--nodelist": ["-w n1", "-wn1", "--nodel=n1"],
    "--exclude": ["-x n1", "-xn1", "--exclud=n1"],
    "--export": ["--expor=ALL"],
}


@pytest.mark.parametrize("name", SLURM_SITES)
def test_rules_of_a_site(name: str) -> None:
    site = make_site(name)
    assert forbidden_options(site) == FORBIDDEN.get(name, set())
    assert set(site.sbatch.required) == REQUIRED.get(name, set())


@pytest.mark.parametrize(
    ("name", "directive"),
    [
        (name, directive)
        for name, options in FORBIDDEN.items()
        for option in sorted(options)
        for directive in (f"{option}=1", *SPELLINGS[option])
    ],
)
def test_a_forbidden_option_is_refused_however_it_is_spelt(name: str, directive: str) -> None:
    site = make_site(name)
    run = make_gpu_run(site, f"job.extra_directives=['{directive}']")
    validate(run, site)
    with pytest.raises(UserError, match=rf"site '{name}' forbids --"):
        plan_job(run, site, RunPaths(Path("/r")))


@pytest.mark.parametrize(("name", "key"), [("mn5_acc", "job.qos"), ("perlmutter", "job.qos"), ("vista", "job.time")])
def test_a_required_option_left_out_is_refused(name: str, key: str) -> None:
    site = make_site(name)
    run = make_gpu_run(site, f"{key}=")
    validate(run, site)
    with pytest.raises(UserError, match=rf"{key}: site '{name}' wants --"):
        plan_job(run, site, RunPaths(Path("/r")))


#: Shares of a node's GPUs; one rank a node, or one a GPU.
_GROUP = st.tuples(st.integers(1, 40), st.sampled_from((0.0, 0.5, 1.0, 1.0)), st.sampled_from((1, 7, 20, 80)))


@given(
    name=st.sampled_from(SLURM_SITES),
    groups=st.tuples(_GROUP, _GROUP),
    rank_per_gpu=st.booleans(),
    mem=st.sampled_from(("", "", "0", "8G")),
    time=st.sampled_from(("", "30", "02:00:00", "1-0", "7-0")),
)
def test_any_run_is_refused_in_a_line_or_asks_as_the_site_wants(
    name: str, groups: tuple[tuple[int, float, int], ...], rank_per_gpu: bool, mem: str, time: str
) -> None:
    site = make_site(name)
    whole = max(partition.gpus_per_node for partition in site.partitions)
    keys = [f"job.time={time}", *(f"groups.{role}.mem={mem}" for role in ("trainer", "rollout", "sandbox"))]
    for role, (nodes, share, cpus) in zip(("trainer", "rollout"), groups, strict=True):
        gpus = int(whole * share)
        keys += [f"groups.{role}.nodes={nodes}", f"groups.{role}.gpus_per_node={gpus}"]
        keys += [f"groups.{role}.cpus_per_task={cpus}"]
        if role == "trainer":
            keys += [f"groups.trainer.ranks_per_node={max(1, gpus) if rank_per_gpu else 1}"]
    run = make_gpu_run(site, *keys)
    try:
        validate(run, site)
        plan = plan_job(run, site, RunPaths(Path("/r")))
    except UserError as error:
        assert "\n" not in str(error)
        return
    for component in plan.components:
        group = getattr(run.groups, component.roles[0])
        names = [option_name(directive) for directive in component.directives]
        assert len(names) == len(set(names))
        assert not forbidden_options(site) & set(names)
        assert set(site.sbatch.required) <= set(names)
        gpus = [n for n in names if n in ("--gres", "--gpus-per-node", "--gpus-per-task", "--gpus")]
        asked = group.gpus_per_node > 0 and site.gpu_request != "none"
        assert gpus == ([f"--{site.gpu_request}"] if asked else [])
        cpus = component.cpus_per_task * component.ntasks_per_node
        assert cpus >= site.sbatch.cpus_per_gpu_min * group.gpus_per_node
        arguments = role_srun_args(run, site, component.roles[0], name="step", placement=place(run, site, ENVIRON))
        assert {a for a in arguments if a.startswith(REQUESTS)} == {
            d for d in component.directives if d.startswith(REQUESTS)
        }
