"""The script of every site file, parsed by a real sbatch whose partitions, features and GPUs are that site's.

What the box's Slurm is too old for is taken out first, and the table of options must have said so.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.job_plan import JobPlan, plan_job
from miles_hpc.cluster.preflight import check_job
from miles_hpc.cluster.render import render_job
from miles_hpc.cluster.site import template_folders
from miles_hpc.cluster.slurm import Slurm
from miles_hpc.cluster.slurm_options import OPTIONS, PLUGIN_OPTIONS, option_complaints, version_of
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import validate
from miles_hpc.core.paths import RunPaths
from tests.slurm.conftest import fresh_box
from tests.unit.runs import make_gpu_run, make_site
from tests.unit.test_site_files import SLURM_SITES
from tools.slurm_box import Box, BoxSpec
from tools.slurm_box.declared import Declared

pytestmark = pytest.mark.slurm

BOX_PARTITIONS = {"trainer", "rollout", "sandbox", "all", "urgent"}  # those that every box has


def declared() -> tuple[Declared, ...]:
    """Nodes that are in every partition of every site. Requests for GPUs without a type fit GPUs of a type, too."""
    partitions = [partition for name in SLURM_SITES for partition in make_site(name).partitions]
    features = {feature for partition in partitions for feature in re.findall(r"\w+", partition.constraint)}
    (kind,) = {partition.gres for partition in partitions} - {""}
    return (
        Declared(
            name="far",
            nodes=100,
            partitions=tuple(sorted({partition.name for partition in partitions} - BOX_PARTITIONS)),
            features=tuple(sorted(features)),
            cpus=512,
            gpus=8,
            gpu_type=kind,
        ),
    )


@pytest.fixture(scope="module")
def wide_box() -> Iterator[Box]:
    nodes = BoxSpec.parse("trainer:1,rollout:1,sandbox:1", declared=declared())
    with fresh_box(nodes) as running:
        yield running


def script(site: SiteConfig, *overrides: str) -> tuple[JobPlan, str]:
    # The box's own partitions are small; elsewhere it is the run of 32 + 32 GPUs.
    small = ("groups.trainer.nodes=1", "groups.rollout.nodes=1") if site.name == "slurm_box" else ()
    run = make_gpu_run(site, *small, *overrides)
    validate(run, site)
    plan = plan_job(run, site, RunPaths(Path("/runs/tiny")))
    return plan, render_job(plan, template_folders())


def ask(box: Box, text: str, **environ: str) -> str:
    """sbatch's complaint about a script, "" when it would take it."""
    command = ["sbatch", "--test-only"]
    done = subprocess.run(command, input=text, env={**box.env(), **environ}, capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("name", SLURM_SITES)
def test_sbatch_parses_the_script_of_every_site(wide_box: Box, name: str) -> None:
    site = make_site(name)
    plan, text = script(site)
    assert ask(wide_box, text, **_partition(site)) == ""
    # The same options mean something: one that the cluster lacks is refused.
    assert "not available" in ask(wide_box, text.replace("--cpus-per-task=", "--cpus-per-task=999"), **_partition(site))
    assert len(plan.components) == text.count("#SBATCH hetjob") + 1


@pytest.mark.parametrize(
    ("name", "layout"), [(n, lay) for n in SLURM_SITES for lay in ("hetjob_span", "split", "split_span")]
)
def test_other_layouts_are_parsed_or_refused_in_a_line(wide_box: Box, name: str, layout: str) -> None:
    """A site that lists no partition for all roles can't hold a split job; the others' scripts are parsed."""
    site = make_site(name)
    try:
        plan, text = script(site, f"job.layout={layout}")
    except UserError as error:
        one_for_all = any({"trainer", "rollout", "sandbox"} <= set(partition.roles) for partition in site.partitions)
        assert layout not in site.layouts if site.layouts else (not one_for_all and layout.startswith("split"))
        assert "\n" not in str(error)
        return
    assert len(plan.components) == (1 if layout.startswith("split") else 3)
    assert ask(wide_box, text, **_partition(site)) == ""


def _partition(site: SiteConfig) -> dict[str, str]:
    """Where Slurm finds the partition by itself, the box is told it: it has no such plug-in."""
    return {} if site.sbatch.partition_stated else {"SBATCH_PARTITION": site.partitions[0].name}


@pytest.mark.parametrize("name", SLURM_SITES)
def test_what_this_slurm_is_too_old_for_is_one_line_before_sbatch(wide_box: Box, name: str) -> None:
    site = make_site(name)
    plan, text = script(site)
    slurm = Slurm(environ=wide_box.env())
    too_new = sorted({o.text for o in OPTIONS for c in plan.components if _states(c.directives, o.name, o.value)})
    expected = {"frontier": ["--network=job_vni", "--network=single_node_vni"], "perlmutter": ["--network=job_vni"]}
    assert too_new == expected.get(name, [])
    if too_new:
        with pytest.raises(UserError, match=r"batch script: --network=\w+ is there from Slurm 23.02 on, this is slurm"):
            check_job(plan, text, slurm)
    else:
        check_job(plan, text, slurm)


def _states(directives: tuple[str, ...], name: str, value: str) -> bool:
    return any(d.partition("=")[0] == name and value in d.partition("=")[2].split(",") for d in directives if "=" in d)


def test_segments_of_a_rack_are_beyond_this_slurm(wide_box: Box) -> None:
    rack = make_site("generic_gb200_nvl72")
    site = msgspec.structs.replace(
        rack, topology=msgspec.structs.replace(rack.topology, segment_directive=True, segment_nodes=4)
    )
    plan, text = script(site)
    assert "#SBATCH --segment=4" in text
    assert "unrecognized option '--segment=4'" in ask(wide_box, text)
    with pytest.raises(UserError, match=r"^batch script: --segment is there from Slurm 24.05 on, this is slurm-wlm 22"):
        check_job(plan, text, Slurm(environ=wide_box.env()))
    without = re.sub(r"#SBATCH --segment=4\n", "", text)
    assert ask(wide_box, without) == ""


#: A value that the option takes, where its name alone isn't enough.
VALUES = {"--tres-per-task": "cpu:1", "--segment": "4"}


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.name != "--network"], ids=lambda option: option.text)
def test_the_table_of_options_is_right_about_this_slurm(wide_box: Box, option: object) -> None:
    """Every option of the table is newer than the box's 22.05, which therefore refuses it; --network takes any text."""
    assert option in OPTIONS
    name, value = option.name, option.value or VALUES.get(option.name, "")  # type: ignore[attr-defined]
    stated = f"{name}={value}" if value else name
    version = version_of(Slurm(environ=wide_box.env()).version())
    assert len(list(option_complaints([stated], version))) == 1
    if option.command == "srun":  # type: ignore[attr-defined]
        done = subprocess.run(["srun", stated, "true"], env=wide_box.env(), capture_output=True, text=True, timeout=60)
        complaint = done.stderr
    else:
        complaint = ask(wide_box, f"#!/bin/bash\n#SBATCH {stated}\ntrue\n")
    assert re.search(r"unrecognized option|doesn't allow an argument|Invalid --exclusive specification", complaint)


@pytest.mark.parametrize("name", sorted(PLUGIN_OPTIONS))
def test_options_of_plug_ins_are_unknown_without_them(wide_box: Box, name: str) -> None:
    assert "unrecognized option" in ask(wide_box, f"#!/bin/bash\n#SBATCH {name}=x\ntrue\n")
    assert len(list(option_complaints([f"{name}=x"], ()))) == 1
    assert list(option_complaints([f"{name}=x"], (), runtimes=[PLUGIN_OPTIONS[name]])) == []


def test_a_plain_script_is_taken(wide_box: Box) -> None:
    """The refusals above are of the options, not of the script around them."""
    assert ask(wide_box, "#!/bin/bash\n#SBATCH --requeue\n#SBATCH --exclusive\n#SBATCH --network=job_vni\ntrue\n") == ""


def test_a_time_over_the_partitions_limit_is_one_line_although_sbatch_would_take_it(wide_box: Box) -> None:
    site = make_site("slurm_box")
    plan, text = script(site, "job.time=02:00:00")
    slurm = Slurm(environ=wide_box.env())
    check_job(plan, text, slurm)
    wide_box.run("scontrol", "update", "partitionname=rollout", "maxtime=90", "maxnodes=3")
    try:
        limits = slurm.partition_limits()
        assert (limits["rollout"].max_time_s, limits["rollout"].max_nodes) == (5400.0, 3)
        assert (limits["trainer"].max_time_s, limits["trainer"].max_nodes) == (float("inf"), None)
        assert ask(wide_box, text) == ""  # it would wait with PartitionTimeLimit
        message = r"^rollout: --time=02:00:00: partition 'rollout' of this cluster allows 01:30:00, the job would wait"
        with pytest.raises(UserError, match=message):
            check_job(plan, text, slurm)
        check_job(*script(site, "job.time=01:30:00"), slurm)
    finally:
        wide_box.run("scontrol", "update", "partitionname=rollout", "maxtime=infinite", "maxnodes=unlimited")
