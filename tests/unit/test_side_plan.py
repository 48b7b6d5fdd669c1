"""What side jobs ask of each site: the text that submitit makes of the plan, against the site's rules."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from miles_hpc.cli.side_kinds import KINDS, make_request, parse_arguments
from miles_hpc.cluster.side_plan import SUBMITIT_STATES, SidePlan, SideRequest, plan_side_job, split_directive
from miles_hpc.cluster.side_submitit import SiteExecutor
from miles_hpc.cluster.site import data_folder
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import site_names
from miles_hpc.core.paths import RunPaths
from miles_hpc.core.site_rules import forbidden_options
from tests.fakes.fake_slurm import FakeSlurm
from tests.unit.runs import make_gpu_run, make_run, make_site

PATHS = RunPaths(Path("/scratch/someone/runs/tiny"))
PROBE = SideRequest(name="probe", function="miles_hpc.cluster.side_tasks:check_checkpoint", roles=("trainer",))
SITES = sorted(name for name in site_names([data_folder("site_configs")]) if make_site(name).scheduler == "slurm")


def plan(site: SiteConfig, run: RunConfig | None = None, request: SideRequest = PROBE, **fields: Any) -> SidePlan:
    return plan_side_job(run or make_run(), site, PATHS, replace(request, **fields), number=3)


def text_of(planned: SidePlan, folder: Path) -> str:
    executor = SiteExecutor(folder, FakeSlurm(), python="python3 -P")
    executor.update_parameters(**planned.parameters)
    return str(executor._make_submission_file_text("python3 -P -m something", ""))


def run_for(site: SiteConfig) -> RunConfig:
    return make_gpu_run(site) if any(p.gpus_per_node for p in site.partitions) else make_run()


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_site_takes_every_kind(name: str, kind: str, tmp_path: Path) -> None:
    site = make_site(name)
    planned = plan(site, run_for(site), make_request(kind, PATHS.root, {}))
    text = text_of(planned, tmp_path)
    stated = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    names = {re.split("[= ]", option)[0] for option in stated}
    # What the plan was checked for is what the script states: submitit adds nothing behind its back.
    assert names == {re.split("[= ]", option)[0] for option in planned.directives}
    assert set(SUBMITIT_STATES) <= names
    assert not names & forbidden_options(site)
    assert set(site.sbatch.required) <= names
    assert "--wckey" not in names
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", "--shell=bash", "-"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("form", "tasks", "option"),
    [
        ("gres", 1, "--gres=gpu:h100:4"),
        ("gpus-per-node", 1, "--gpus-per-node=h100:4"),
        ("gpus-per-task", 2, "--gpus-per-task=h100:2"),
        ("none", 1, ""),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants(form: str, tasks: int, option: str) -> None:
    base = make_site()
    partitions = [msgspec.structs.replace(p, gres="h100", gpus_per_node=8) for p in base.partitions]
    site = msgspec.structs.replace(base, gpu_request=form, partitions=partitions)
    found = [d for d in plan(site, gpus_per_node=4, tasks_per_node=tasks).directives if "gpu" in d]
    assert found == ([option] if option else [])
    assert not [d for d in plan(site).directives if "gpu" in d]


def test_memory_account_and_further_directives() -> None:
    site = msgspec.structs.replace(
        make_site(),
        requeue=False,
        directives=["--exclusive", "-w n1"],
        sbatch=msgspec.structs.replace(make_site().sbatch, mem="zero", cpus_per_gpu_min=8, partition_stated=False),
    )
    run = make_run("job.account=project", "job.qos=fast", 'job.extra_directives=["--reservation=day one"]')
    planned = plan(site, run, gpus_per_node=2)
    assert set(planned.directives) == {
        "--job-name=tiny-side0003-probe",
        "--time=30",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--mem=0",
        "--account=project",
        "--qos=fast",
        "--chdir=/scratch/someone/runs/tiny",
        "--no-requeue",
        "--exclusive",
        "--nodelist=n1",
        "--reservation=day one",
        *SUBMITIT_STATES,
    }
    assert planned.parameters["srun_args"][1] == "--cpus-per-task=16"


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("--gres=gpu:4", ("gres", "gpu:4")),
        ("--constraint a&b", ("constraint", "a&b")),
        ('--constraint="a&b"', ("constraint", "a&b")),
        ("--exclusive", ("exclusive", True)),
        ("-wn1", ("nodelist", "n1")),
        ("-w n1", ("nodelist", "n1")),
        ("-A project", ("account", "project")),
    ],
)
def test_directives_of_both_forms(text: str, pair: tuple[str, str | bool]) -> None:
    assert split_directive(text) == pair


def test_the_environment_survives_the_shell(tmp_path: Path) -> None:
    values = {"A": "two words", "B": 'it\'s $HOME, "quoted"', "C": "a,b"}
    planned = plan(msgspec.structs.replace(make_site(), env=values, modules=["gcc/12"]))
    setup = [line for line in planned.parameters["setup"] if line.startswith("export ")]
    shell = "\n".join([*setup, 'printf "%s\\n" "$A" "$B" "$C" "$PYTHONSAFEPATH"'])
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*values.values(), "1"]
    text = text_of(planned, tmp_path)
    assert text.index("export A=") < text.index("module load gcc/12") < text.index("srun --unbuffered")


@pytest.mark.parametrize(
    ("time", "limit_s", "signal_s"), [("1", 60, 15), ("00:04:30", 300, 75), ("00:30:00", 1800, 90), ("1-0", 86400, 90)]
)
def test_the_signal_leaves_most_of_a_short_job(time: str, limit_s: float, signal_s: int) -> None:
    planned = plan(make_site(), time=time)
    assert (planned.time_limit_s, planned.signal_s) == (limit_s, signal_s)


def test_roles_decide_partition_and_interpreter() -> None:
    run = make_run("python.trainer=/envs/train/bin/python", "python.controller=/envs/light/bin/python")
    first = plan(make_site(), run, roles=("sandbox", "trainer"), python_role="controller")
    assert (first.role, first.parameters["partition"], first.python) == ("sandbox", "sandbox", "/envs/light/bin/python")
    site = msgspec.structs.replace(make_site(), partitions=make_site().partitions[:1])
    second = plan(site, run, roles=("sandbox", "trainer"))
    assert (second.role, second.python) == ("trainer", "/envs/train/bin/python")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"name": "Bad Name"}, "expected a name"),
        ({"function": "os.system"}, "package.module:function"),
        ({"function": "a:b; rm"}, "package.module:function"),
        ({"nodes": 0}, "nodes = 0"),
        ({"gpus_per_node": -1}, "gpus_per_node = -1"),
        ({"time": "UNLIMITED"}, "a minute or more"),
        ({"time": "0:10"}, "a minute or more"),
        ({"time": "soon"}, "time 'soon'"),
        ({"roles": ()}, "expected one of trainer"),
        ({"roles": ("judge",)}, "'judge'"),
    ],
)
def test_bad_requests(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)):
        plan(make_site(), **fields)


def test_bad_paths_sites_and_directives() -> None:
    with pytest.raises(UserError, match="this machine is one"):
        plan_side_job(make_run(), make_site("laptop"), PATHS, replace(PROBE, nodes=2), number=1, local=True)
    for root in ("/runs/50%", "/runs/it's", '/runs/"x"'):
        with pytest.raises(UserError, match="side jobs need a path"):
            plan_side_job(make_run(), make_site(), RunPaths(Path(root)), PROBE, number=1)
    with pytest.raises(UserError, match="has no partition for trainer"):
        plan(msgspec.structs.replace(make_site(), partitions=[]))
    rules = msgspec.structs.replace(make_site().sbatch, forbidden=["--error"])
    with pytest.raises(UserError, match="forbids --error"):
        plan(msgspec.structs.replace(make_site(), sbatch=rules))
    rules = msgspec.structs.replace(make_site().sbatch, required=["--licenses"])
    with pytest.raises(UserError, match="wants --licenses"):
        plan(msgspec.structs.replace(make_site(), sbatch=rules))
    with pytest.raises(UserError, match="isn't a multiple"):
        plan(msgspec.structs.replace(make_site(), gpu_request="gpus-per-task"), gpus_per_node=3, tasks_per_node=2)


def test_kinds_and_arguments_of_the_command_line() -> None:
    request = make_request("verify-checkpoint", Path("/r"), {"step": 3}, nodes=None, time="5")
    assert (dict(request.arguments), request.time, request.nodes) == ({"run_dir": "/r", "step": 3}, "5", 1)
    own = make_request("my.module:My_Thing", Path("/r"), {"x": 1}, nodes=2)
    assert (own.name, own.function, dict(own.arguments), own.nodes) == ("my-thing", "my.module:My_Thing", {"x": 1}, 2)
    program = make_request("doctor", Path("/r"), {"module": "a.b", "arguments": ["--run-dir", "{run_dir}/x", 1]})
    assert dict(program.arguments) == {"module": "a.b", "arguments": ["--run-dir", "/r/x", "1"]}
    with pytest.raises(UserError, match="no side job 'verify'"):
        make_request("verify", Path("/r"), {})
    assert parse_arguments(["a=1", "b=text", "c=[1]", "d=", "e=x=y"]) == {
        "a": 1,
        "b": "text",
        "c": [1],
        "d": "",
        "e": "x=y",
    }
    for bad in ("a", "=1", "a-b=1"):
        with pytest.raises(UserError, match="KEY=VALUE"):
            parse_arguments([bad])
