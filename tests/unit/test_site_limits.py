"""Limits on nodes, times and jobs: what is over one is a line; what is exactly at it passes."""

from __future__ import annotations

import msgspec
import pytest

from miles_hpc.core.config import SiteConfig, SiteLifecycle, SitePartition, SiteQos, SiteSizeLimit
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import validate
from miles_hpc.core.site_limits import limit_complaints
from tests.unit.runs import make_gpu_run, make_run, make_site

BINS = [SiteSizeLimit(max_nodes=1, max_time="01:00:00"), SiteSizeLimit(max_nodes=2, max_time="2:00:00")]


def site(**changes: object) -> SiteConfig:
    """Trainer and rollout share partition 'gpu', the sandbox has 'cpu'. The run of `make_run` has 2 + 2 and 1 nodes."""
    shared = {key: value for key, value in changes.items() if key in SitePartition.__struct_fields__}
    gpu = SitePartition(name="gpu", roles=["trainer", "rollout"], **shared)  # type: ignore[arg-type]
    cpu = SitePartition(name="cpu", roles=["sandbox"])
    rest = {key: value for key, value in changes.items() if key not in shared}
    return msgspec.structs.replace(SiteConfig(name="s", partitions=[gpu, cpu]), **rest)  # type: ignore[arg-type]


def long_qos(**limits: object) -> list[SiteQos]:
    return [SiteQos(name="long", **limits), SiteQos(name="short", max_time="10")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "overrides", "complaint"),
    [
        ({"max_nodes": 4}, [], ""),
        ({"max_nodes": 3}, [], "groups: 4 nodes (trainer 2 + rollout 2): partition 'gpu' of site 's' allows 3"),
        ({"max_nodes": 1}, [], "groups.trainer: nodes = 2: partition 'gpu' of site 's' allows 1"),
        ({"max_nodes": 2}, ["groups.rollout.partition=cpu"], ""),  # only those in the partition count
        ({"qos": long_qos(max_nodes=5)}, ["job.qos=long"], ""),
        (
            {"qos": long_qos(max_nodes=4)},
            ["job.qos=long"],
            "groups: 5 nodes (trainer 2 + rollout 2 + sandbox 1): QOS 'long' of site 's' allows 4",
        ),
        ({"qos": long_qos(max_nodes=4)}, [], ""),  # another QOS
        ({"max_time": "01:00:00"}, ["job.time=60"], ""),
        ({"max_time": "01:00:00"}, ["job.time=59:31"], ""),  # an hour, rounded up
        (
            {"max_time": "01:00:00"},
            ["job.time=1:00:01"],
            "job.time = \"1:00:01\": partition 'gpu' of site 's' allows 01:00:00: ask for less, a run goes on in its "
            "next allocation",
        ),
        ({"max_time": "01:00:00"}, ["job.time=UNLIMITED"], "partition 'gpu' of site 's' allows 01:00:00"),
        ({"max_time": "10:00"}, ["job.time=10:00:00"], "partition 'gpu' of site 's' allows 10:00:"),  # ten minutes
        ({"max_time": "1-0"}, ["job.time=24:01:00"], "partition 'gpu' of site 's' allows 1-0: "),
        ({"max_time": "UNLIMITED"}, ["job.time=30-0"], ""),
        ({"max_time": "01:00:00"}, ["job.time="], ""),  # the partition's default
        (
            {"max_time": "1:00:00", "qos": long_qos(max_time="4-0")},
            ["job.qos=long", "job.time=4-0"],
            "",  # the QOS lengthens the partition's time, as boost_qos_lprod does
        ),
        ({"qos": long_qos()}, ["job.qos=short", "job.time=11"], "QOS 'short' of site 's' allows 10: ask for less"),
        ({"limits": BINS}, ["job.time=2:00:00"], ""),
        ({"limits": BINS}, ["job.time=121"], "allows 2:00:00 up to 2 nodes, and groups.trainer has 2: ask for less"),
        ({"limits": BINS}, ["job.time=121", "groups.trainer.nodes=3", "groups.rollout.nodes=3"], ""),
        (
            {"limits": BINS},
            ["job.time=61", "groups.rollout.nodes=1"],
            "allows 01:00:00 up to 1 nodes, and groups.rollout has 1",
        ),
        ({"node_minutes": 90}, ["job.time=22"], ""),
        (
            {"node_minutes": 90},
            ["job.time=23"],
            "partition 'gpu' of site 's' allows 90 node-minutes, which is 00:22:00 for 4 nodes: ask for less",
        ),
        ({"max_running": 2}, [], ""),
        ({"max_running": 1}, [], "partition 'gpu' of site 's' runs 1 of a user's jobs at once, and a het job counts"),
        ({"max_running": 1}, ["groups.rollout.partition=cpu"], ""),
        ({"max_submitted": 2}, [], ""),
        (
            {"max_submitted": 1},
            [],
            "partition 'gpu' of site 's' takes 1 of a user's jobs at once, and a het job counts",
        ),
        ({"qos": long_qos(max_running=3)}, ["job.qos=long"], ""),
        ({"qos": long_qos(max_running=2)}, ["job.qos=long"], "QOS 'long' of site 's' runs 2 of a user's jobs at once"),
        ({"lifecycle": SiteLifecycle(max_requeues=5)}, ["job.max_allocations=6"], ""),
        ({"lifecycle": SiteLifecycle(max_requeues=5), "requeue": False}, ["job.max_allocations=7"], ""),
        (
            {"lifecycle": SiteLifecycle(max_requeues=5)},
            ["job.max_allocations=7"],
            "job.max_allocations = 7: site 's' requeues a job 5 times: set it to 6 or less",
        ),
        (
            {"lifecycle": SiteLifecycle(chaining_forbidden=["gpu"])},
            [],
            "site 's' forbids jobs that follow each other in 'gpu': set job.max_allocations = 1",
        ),
    ],
)
def test_a_limit(changes: dict[str, object], overrides: list[str], complaint: str) -> None:
    run = make_run(*overrides)
    if not complaint:
        validate(run, site(**changes))
        return
    with pytest.raises(UserError) as caught:
        validate(run, site(**changes))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "complaint"),
    [
        ("frontier", ["job.time=02:00:00"], ""),
        ("frontier", ["job.time=02:01:00"], "allows 02:00:00 up to 91 nodes, and groups.trainer has 4"),
        ("clariden", ["job.time=12:00:00"], ""),
        ("clariden", ["job.time=12:00:01"], "partition 'normal' of site 'clariden' allows 12:00:00"),
        ("clariden", ["groups.trainer.partition=debug", "groups.trainer.nodes=4", "job.time=22"], ""),
        (
            "clariden",
            [
                *(f"groups.{role}.{key}" for role in ("trainer", "rollout") for key in ("partition=debug", "nodes=2")),
                "job.time=22",
            ],
            "partition 'debug' of site 'clariden' runs 1 of a user's jobs at once, and a het job counts once for each "
            "of its 2 components there: choose another",
        ),
        (
            "clariden",
            ["groups.trainer.partition=debug", "groups.trainer.nodes=4", "job.time=23"],
            "allows 90 node-minutes, which is 00:22:00 for 4 nodes",
        ),
        ("leonardo", ["job.time=1-00:00:01"], "partition 'boost_usr_prod' of site 'leonardo' allows 24:00:00"),
        ("leonardo", ["job.time=4-0", "job.qos=boost_qos_lprod"], ""),
        ("perlmutter", ["job.time=48:01:00"], "QOS 'regular' of site 'perlmutter' allows 48:00:00"),
        ("mn5_acc", ["job.time=73:00:00"], "QOS 'acc_ehpc' of site 'mn5_acc' allows 72:00:00"),
        ("mn5_acc", ["job.qos=acc_debug", "job.time=02:30:00"], "QOS 'acc_debug' of site 'mn5_acc' allows 02:00:00"),
        (
            "vista",
            ["groups.rollout.nodes=33"],
            "groups: 65 nodes (trainer 32 + rollout 33): partition 'gh' of site 'vi",
        ),
        ("vista", ["job.time=48:30:00"], "partition 'gh' of site 'vista' allows 48:00:00"),
        ("lumi_g", ["job.time=2-00:01:00"], "partition 'standard-g' of site 'lumi_g' allows 2-00:00:00"),
        ("isambard_ai", ["job.time=25:00:00"], "partition 'workq' of site 'isambard_ai' allows 24:00:00"),
        ("deltaai", ["job.time=49:00:00"], "partition 'ghx4' of site 'deltaai' allows 48:00:00"),
        ("jupiter", ["job.time=30-0"], ""),  # nobody knows a limit
    ],
)
def test_limits_of_shipped_sites(name: str, overrides: list[str], complaint: str) -> None:
    its = make_site(name)
    run = make_gpu_run(its, *overrides)
    if not complaint:
        validate(run, its)
        return
    with pytest.raises(UserError) as caught:
        validate(run, its)
    assert complaint in str(caught.value)


def test_one_job_of_all_groups_counts_once() -> None:
    """A split layout: the size of the job is that of all groups, and it runs as one."""
    five = [SiteSizeLimit(max_nodes=4, max_time="01:00:00"), SiteSizeLimit(max_nodes=5, max_time="02:00:00")]
    one = msgspec.structs.replace(site(limits=five, max_running=1), layout="split")
    placed = {"trainer": one.partitions[0], "rollout": one.partitions[0], "sandbox": one.partitions[0]}
    assert list(limit_complaints(make_run("job.time=02:00:00"), one, placed)) == []
    (complaint,) = limit_complaints(make_run("job.time=02:01:00"), one, placed)
    assert "allows 02:00:00 up to 5 nodes, and the job has 5: ask for less" in complaint
