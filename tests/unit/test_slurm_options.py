"""The table of options by version, and what is said before sbatch about an option that this Slurm doesn't know."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.preflight import check_job, check_site
from miles_hpc.cluster.slurm import PartitionLimits
from miles_hpc.cluster.slurm_options import OPTIONS, option_complaints, version_of
from miles_hpc.core.config import SiteFabric, SiteTopology
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_run, make_site


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm-wlm 22.05.8", (22, 5, 8)),
        ("slurm 25.11.4", (25, 11, 4)),
        ("24.05", (24, 5)),
        ("slurm-fake 0", ()),
        ("", ()),
    ],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert version_of(text) == version


def test_every_entry_says_since_when_and_who_says_so() -> None:
    assert all(option.since and option.source and option.name.startswith("--") for option in OPTIONS)
    assert len({option.text for option in OPTIONS}) == len(OPTIONS)


@pytest.mark.parametrize(
    ("directive", "version", "complaint"),
    [
        ("--segment=4", (22, 5, 8), "--segment is there from Slurm 24.05 on, this is Slurm 22.5.8: take it out"),
        ("--segment 4", (23, 11, 7), "--segment is there from Slurm 24.05 on"),
        ("--segment=4", (24, 5), ""),
        ("--segment=4", (25, 11, 7), ""),
        ("--segment=4", (), ""),  # nobody knows the version
        ("--exclusive", (22, 5, 8), ""),
        ("--exclusive=user", (22, 5, 8), ""),
        ("--exclusive=topo", (22, 5, 8), "--exclusive=topo is there from Slurm 24.05 on"),
        ("--requeue", (22, 5, 8), ""),
        ("--requeue=expedite", (25, 5, 0), "Slurm 25.11 on, this is Slurm 25.5.0: state --requeue instead"),
        ("--network=disable_rdzv_get", (22, 5, 8), ""),
        ("--network=single_node_vni,job_vni", (22, 5, 8), "--network=job_vni is there from Slurm 23.02 on"),
        ("--network=single_node_vni,job_vni", (23, 2, 3), ""),
        ("--environment=ngc", (25, 5, 0), "--environment is an option of the plug-in for cscs-ce, and container.runt"),
        ("--container-image=x", (), "--container-image is an option of the plug-in for enroot"),
        ("--gres=gpu:4", (22, 5, 8), ""),
    ],
)
def test_an_option_and_a_version(directive: str, version: tuple[int, ...], complaint: str) -> None:
    complaints = list(option_complaints([directive], version))
    assert (complaint in complaints[0]) if complaint else complaints == []


def test_a_runtime_brings_its_options() -> None:
    stated = ["--environment=ngc", "--container-image=x"]
    assert list(option_complaints(stated, (25, 5), runtimes=["cscs-ce", "enroot"])) == []
    (complaint,) = option_complaints(stated, (25, 5), runtimes=["cscs-ce", "apptainer"])
    assert "container.runtimes of the site file are apptainer, cscs-ce: take it out, or add the runtime" in complaint


class OldSlurm(FakeSlurm):
    """The box's Slurm 22.05 in memory; it must not come to the question whether it takes the script."""

    def version(self) -> str:
        return "slurm-wlm 22.05.8"

    def partitions(self) -> list[str]:
        return [partition.name for partition in make_site().partitions]

    def test(self, script: str | Path) -> None:
        raise AssertionError("sbatch was asked")


def test_a_script_with_a_newer_option_is_one_line_before_sbatch() -> None:
    plan = plan_job(make_run(), make_site(), RunPaths(Path("/runs/tiny")))
    text = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH hetjob\n#SBATCH --segment=2  \nset -e\n#SBATCH --stepmgr\n"
    with pytest.raises(UserError) as caught:
        check_job(plan, text, OldSlurm())
    complaint = "--segment is there from Slurm 24.05 on, this is slurm-wlm 22.05.8: take it out"
    assert str(caught.value) == f"batch script: {complaint}"
    with pytest.raises(AssertionError, match="sbatch was asked"):
        check_job(plan, "#!/bin/bash\n#SBATCH --nodes=2\n\nset -e\n#SBATCH --stepmgr\n", OldSlurm())


def test_a_time_that_would_wait_for_ever_is_one_line_before_sbatch() -> None:
    limits = {"trainer": PartitionLimits(max_time_s=3600.0, max_nodes=None)}
    slurm = FakeSlurm(limits=limits)
    for time, fits in (("01:00:00", True), ("60", True), ("61", False), ("UNLIMITED", False), ("", True)):
        plan = plan_job(make_run(f"job.time={time}"), make_site(), RunPaths(Path("/runs/tiny")))
        if fits:
            check_job(plan, "#!/bin/bash\n", slurm)
            continue
        with pytest.raises(UserError) as caught:
            check_job(plan, "#!/bin/bash\n", slurm)
        assert str(caught.value) == (
            f"trainer: --time={time}: partition 'trainer' of this cluster allows 01:00:00, the job would wait for "
            "ever: set job.time"
        )
    # A QOS may lengthen it: that is left to Slurm.
    long = plan_job(make_run("job.time=61", "job.qos=long"), make_site(), RunPaths(Path("/runs/tiny")))
    check_job(long, "#!/bin/bash\n", slurm)


def test_sites_check_says_so_too() -> None:
    site = msgspec.structs.replace(
        make_site(),
        fabric=SiteFabric(kind="cxi", slurm_network="job_vni"),
        topology=SiteTopology(segment_directive=True, segment_nodes=2),
        directives=["--exclusive=topo"],
    )
    failed = [finding.text for finding in check_site(site, OldSlurm()) if not finding.ok]
    assert [text.split(" is there")[0] for text in failed] == [
        f"the site file states an option: {option}" for option in ("--network=job_vni", "--segment", "--exclusive=topo")
    ]
    assert all(finding.ok for finding in check_site(make_site(), OldSlurm()))
