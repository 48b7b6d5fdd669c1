"""Reports on networks and GPUs: what the shipped site files set, and what of it reaches whom."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.placement import place, role_srun_args
from miles_hpc.cluster.site import role_environment
from miles_hpc.core.config import SiteConfig
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_gpu_run, make_site
from tests.unit.test_site_files import SLURM_SITES

CXI = [name for name in SLURM_SITES if make_site(name).fabric.kind == "cxi"]


def environments(site: SiteConfig) -> list[dict[str, str]]:
    """What roles may get at a site: on one node and on several, with each set of variables."""
    sets = [site.env_set, *(one.name for one in site.env_sets)]
    sites = [msgspec.structs.replace(site, env_set=name) for name in dict.fromkeys(sets)]
    return [role_environment(one, nodes=nodes) for one, nodes in product(sites, (1, 2))]


@pytest.mark.parametrize("name", CXI)
def test_no_site_on_slingshot_watches_memory_by_hooks(name: str) -> None:
    for environ in environments(make_site(name)):
        assert environ.get("FI_MR_CACHE_MONITOR", "userfaultfd") in ("userfaultfd", "kdreg2")


@pytest.mark.parametrize("name", CXI)
def test_no_site_on_slingshot_asks_for_ll128_or_for_many_channels(name: str) -> None:
    for environ in environments(make_site(name)):
        assert environ.get("NCCL_PROTO", "") in ("", "^LL128", "Simple")
        assert int(environ.get("NCCL_MAX_NCHANNELS", "0")) <= 20


def test_where_a_prefix_of_names_hung_one_adapter_is_named() -> None:
    site = make_site("deltaai")
    assert role_environment(site, nodes=2)["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert site.fabric.bootstrap_interface == "hsn0"


@pytest.mark.parametrize("name", SLURM_SITES)
def test_tasks_of_a_node_see_all_its_gpus_unless_the_site_wants_otherwise(name: str) -> None:
    """GPUs that are bound to tasks hide peers from each other: no P2P, "invalid device ordinal"."""
    site = make_site(name)
    run = make_gpu_run(site, "job.time=60")
    hosts = {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": f"x{i}[01-40]" for i in range(3)}
    made = place(run, site, {"SLURM_HET_SIZE": "3", **hosts})
    step = role_srun_args(run, site, "trainer", name="t", placement=made)
    job = plan_job(run, site, RunPaths(Path("/r"))).components[0].directives
    for words in (step, job):
        bound = [word for word in words if word.startswith(("--gpus-per-task", "--ntasks-per-gpu"))]
        assert bound == (["--gpus-per-task=1"] if site.gpu_request == "gpus-per-task" else [])
        assert {word for word in words if word.startswith("--gpu-bind")} <= {"--gpu-bind=none"}
