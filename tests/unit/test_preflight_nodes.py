"""Asking nodes: the steps' command lines, what nodes tell through srun, nodes that stay silent."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from miles_hpc.cli.inputs import find_run_file
from miles_hpc.cluster.preflight.contract import Context
from miles_hpc.cluster.preflight.gather import ask_nodes
from miles_hpc.cluster.preflight.node_line import NodeLine, NodeResult, Reassembly, framed
from miles_hpc.cluster.preflight.plan_size import parameters, run_size
from miles_hpc.cluster.preflight.step import JobRequest, NodeSteps, plan_steps
from miles_hpc.cluster.site import data_folder
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import load_run
from miles_hpc.core.site_rules import directive_complaints
from tests.unit.preflight_cases import LARGE, site_with
from tests.unit.runs import make_gpu_run, make_run, make_site

PROGRAM = ["-m", "look"]


def plan(
    site: SiteConfig | None,
    nodes: int = 2,
    run: RunConfig | None = None,
    request: JobRequest | None = None,
    **environ: str,
) -> NodeSteps:
    return plan_steps(Context(site=site, run=run, environ=environ), nodes, PROGRAM, request)


@pytest.mark.parametrize(
    ("site", "request_", "expected"),
    [
        ("slurm_box", None, ["--partition=trainer", "--cpus-per-task=1"]),
        (
            "perlmutter",
            JobRequest(account="m1_g", qos="debug"),
            ["--gpus-per-node=4", "--gpu-bind=none", "--qos=debug"],
        ),
        ("clariden", None, ["--gpus-per-task=4", "--partition=normal"]),
        ("mn5_acc", JobRequest(account="a", qos="acc_debug"), ["--gres=gpu:4", "--cpus-per-task=80"]),
        ("vista", None, ["--partition=gh"]),
        ("frontier", JobRequest(account="a"), ["--network=single_node_vni,job_vni,disable_rdzv_get"]),
    ],
)
def test_a_job_of_its_own_asks_as_the_site_wants(site: str, request_: JobRequest | None, expected: list[str]) -> None:
    config = make_site(site)
    steps = plan(config, request=request_ or JobRequest(account="a"))
    (command,) = steps.commands
    assert command[0] == "srun"
    assert set(expected) <= set(command), command
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--time=5"} <= set(command)
    assert command[-3:] == ("-P", "-m", "look")
    assert steps.own_job
    for option in config.sbatch.forbidden:
        assert not [word for word in command if word.startswith(option)], command


def test_what_a_site_requires_is_named() -> None:
    with pytest.raises(UserError, match="--account"):
        plan(make_site("perlmutter"))
    with pytest.raises(UserError, match=r"site 'slurm_box' has .*trainer"):
        plan(make_site(), request=JobRequest(partition="nope"))
    with pytest.raises(UserError, match="expected 1 or more"):
        plan(make_site(), 0)
    with pytest.raises(UserError, match="no site is chosen"):
        plan(None)
    with pytest.raises(UserError, match="no scheduler"):
        plan(make_site("laptop"))


def test_a_run_brings_account_qos_and_constraint() -> None:
    site = make_site("perlmutter")
    run = make_gpu_run(site, "job.account=m2_g", "job.qos=regular", "groups.trainer.constraint='gpu&hbm80g'")
    (command,) = plan(site, run=run).commands
    assert {"--account=m2_g", "--qos=regular", "--constraint=gpu&hbm80g"} <= set(command)


def test_modules_and_variables_of_the_site_reach_the_tasks(tmp_path: Path) -> None:
    steps = plan(make_site("frontier"), request=JobRequest("a"))
    (command,) = steps.commands
    task = command[command.index("bash") :]
    assert steps.environ["FI_MR_CACHE_MONITOR"] == "kdreg2"
    # As the batch script: `module` is a function that the shell inherits.
    loaded = 'module() { echo "loaded $*"; }; export -f module; "$@"'
    done = subprocess.run(
        ["bash", "-c", loaded, "x", *task[:4], "echo", "a b"], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "loaded load rccl-net-plugin/1.0\na b\n"


def test_inside_a_plain_job_one_step_on_some_of_its_nodes() -> None:
    steps = plan(make_site(), 2, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-4]", SLURM_CPUS_PER_TASK="9", HOME="/h")
    (command,) = steps.commands
    assert {"--nodelist=n[1-2]", "--overlap", "--nodes=2", "--cpus-per-task=1"} <= set(command)
    assert (steps.hosts, steps.own_job) == (("n1", "n2"), False)
    assert "SLURM_CPUS_PER_TASK" not in steps.environ
    assert steps.environ["SLURM_JOB_ID"] == "7"
    with pytest.raises(UserError, match=r"this allocation has 4 nodes, n\[1-4\]"):
        plan(make_site(), 5, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-4]")


def test_inside_a_het_job_one_step_per_component() -> None:
    het = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "3",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_2": "c1",
    }
    steps = plan(make_site(), 3, **het)
    assert [[word for word in command if word.startswith(("--het", "--nodelist"))] for command in steps.commands] == [
        ["--het-group=0", "--nodelist=a[1-2]"],
        ["--het-group=1", "--nodelist=b1"],
    ]


def test_a_component_of_a_run_is_asked_with_its_gpus() -> None:
    site = make_site("perlmutter")
    het = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-8]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-8]",
    }
    steps = plan(site, 16, make_gpu_run(site), **het)
    assert all("--gpus-per-node=4" in command for command in steps.commands)


# ------------------------------------------------------------------------------------------------ through srun


def line(node: str, results: int = 60) -> NodeLine:
    found = tuple(NodeResult(check=f"c{i}", status="ok", saw="späte Prüfung " * 5) for i in range(results))
    return NodeLine(node=node, job="7", now=1.0, results=found, facts={"clock": 1.0, "nics": {"a": [1]}})


def test_what_a_node_tells_survives_a_mixture_of_lines() -> None:
    told = {node: list(framed(line(node))) for node in ("n1", "n2", "n3")}
    assert all(len(text) < 1000 for lines in told.values() for text in lines)
    mixed = [text for lines in told.values() for text in lines] + ["Welcome to the cluster", '{"type": "other"}', ""]
    for seed in range(20):
        random.Random(seed).shuffle(mixed)
        pieces = Reassembly()
        found = [one for text in mixed if (one := pieces.add(f"{text}\n")) is not None]
        assert sorted(one.node for one in found) == ["n1", "n2", "n3"]
        assert all(one == line(one.node) for one in found)


def test_a_line_that_was_cut_off_tells_nothing() -> None:
    lines = list(framed(line("n1")))
    pieces = Reassembly()
    assert [pieces.add(text) for text in lines[:-1]] == [None] * (len(lines) - 1)
    assert pieces.add("miles-hpc-doctor n1 1/1 !!!") is None
    assert Reassembly().add("miles-hpc-doctor n1 1/1 AAAA") is None


def steps_of(tmp_path: Path, script: str, nodes: int = 2, hosts: tuple[str, ...] = ("n1", "n2")) -> NodeSteps:
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    return NodeSteps((("srun",),), nodes, hosts, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, own_job=False)


def printed(*lines: NodeLine) -> str:
    return "\n".join(f"echo '{text}'" for one in lines for text in framed(one))


def test_answers_are_gathered_with_their_clocks(tmp_path: Path) -> None:
    gathered = ask_nodes(steps_of(tmp_path, f"echo hello; {printed(line('n1'), line('n2'))}"), timeout_s=30.0)
    assert set(gathered.facts) == {"n1", "n2"}
    assert gathered.facts["n1"]["clock"] < -1e9  # as far as 1 January 1970 is behind this host's clock
    assert (gathered.results[0].check, gathered.results[0].finding.saw) == ("nodes", "2 nodes answered: n[1-2]")
    assert {r.node for r in gathered.results[1:]} == {"n1", "n2"}


def test_a_silent_node_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    script = f"{printed(line('n1'))}\necho 'srun: error: Task launch failed on node n2' >&2; exec sleep 300"
    gathered = ask_nodes(steps_of(tmp_path, script), timeout_s=1.0)
    finding = gathered.results[0].finding
    assert finding.status == "FAIL"
    assert "from n2 (srun: error: Task launch failed on node n2)" in finding.saw
    assert "scontrol show node n2" in finding.do
    assert set(gathered.facts) == {"n1"}


def test_a_step_that_fails_at_once_is_told_with_its_words(tmp_path: Path) -> None:
    gathered = ask_nodes(
        steps_of(tmp_path, "echo 'srun: error: Invalid account' >&2; exit 1", hosts=()), timeout_s=60.0
    )
    (result,) = gathered.results
    assert "2 of 2 nodes didn't answer" in result.finding.saw
    assert "Invalid account" in result.finding.saw


def test_checks_that_could_not_begin_on_a_node(tmp_path: Path) -> None:
    broken = NodeLine(node="n1", error="no site named 'x'")
    gathered = ask_nodes(steps_of(tmp_path, printed(broken), 1, ("n1",)), timeout_s=30.0)
    assert [r.finding.saw for r in gathered.results if not r.finding.ok] == [
        "the checks couldn't begin: no site named 'x'"
    ]


def test_without_srun(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no srun on PATH"):
        ask_nodes(NodeSteps((("srun",),), 1, (), {"PATH": str(tmp_path)}, own_job=True), timeout_s=1.0)


# ------------------------------------------------------------------------------------------------ how large a run is


def test_parameters_by_the_models_sizes() -> None:
    llama_70b = LARGE.model.config
    assert parameters(llama_70b) == pytest.approx(70.55e9, rel=0.01)
    qwen3_30b_a3b = {
        "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }  # fmt: skip
    assert parameters(qwen3_30b_a3b) == pytest.approx(30.5e9, rel=0.01)
    demo = load_run(find_run_file("demo")).model.config
    assert parameters(demo) == pytest.approx(1.3e6, rel=0.05)
    assert parameters({"hidden_size": 8}) == 0
    assert parameters({"hidden_size": None, "num_hidden_layers": 1, "vocab_size": 1}) == 0


def test_the_size_of_a_run_grows_with_what_it_keeps() -> None:
    config = LARGE.model.config
    size = run_size(LARGE, config)
    assert size is not None
    assert size.checkpoint_bytes == size.parameters * 12
    assert size.largest_file_bytes == -(-size.checkpoint_bytes // 32)
    assert size.total_bytes > 4 * size.checkpoint_bytes  # checkpoint.keep = 3 and the one being written
    with_reference = run_size(make_gpu_run(site_with("generic_h100_ib"), "train.use_kl_loss=true"), config)
    assert with_reference is not None
    assert with_reference.checkpoint_bytes == size.parameters * 16
    assert run_size(make_run(), {}) is None
    evaluated = run_size(make_gpu_run(site_with("generic_h100_ib"), "eval.n_episodes=64", "eval.interval=10"), config)
    assert evaluated is not None
    assert evaluated.total_files - size.total_files == 12 + 64  # 100 steps: before, after, every 10; one at a time
    assert evaluated.total_bytes > size.total_bytes


@pytest.mark.parametrize("name", sorted(path.stem for path in data_folder("site_configs").glob("*.toml")))
def test_every_site_can_be_asked_and_its_rules_hold(name: str) -> None:
    site = make_site(name)
    if site.scheduler == "none":
        pytest.skip("no scheduler")
    qos = site.qos[0].name if site.qos and "--qos" in site.sbatch.required else ""
    (command,) = plan(site, 4, request=JobRequest("project", qos)).commands
    stated = [word for word in command[: command.index("--input=none")] if word.startswith("-")]
    assert list(directive_complaints(site, stated, [])) == []
    gpus = max(partition.gpus_per_node for partition in site.partitions if "trainer" in partition.roles)
    asked = [word for word in stated if word.startswith(("--gres=gpu", "--gpus-per"))]
    assert len(asked) == (0 if site.gpu_request == "none" or not gpus else 1)
    run = make_gpu_run(site, *([f"job.qos={qos}"] if qos else []))
    assert plan(site, 4, run=run).own_job
