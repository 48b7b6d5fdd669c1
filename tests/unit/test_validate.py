"""Rules across fields: each broken rule gives one line that names the key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest

from miles_hpc.core.config import GroupConfig, RunConfig, SiteConfig, SitePartition
from miles_hpc.core.errors import UserError
from miles_hpc.core.layouts import partition_of
from miles_hpc.core.load import validate
from miles_hpc.core.validate import NUMBERS
from tests.unit.runs import make_run, make_site


def gpu_site(**changes: object) -> SiteConfig:
    partitions = [
        SitePartition(name="gpu", roles=["trainer", "rollout"], gpus_per_node=4, cpus_per_node=64, nodes=8),
        SitePartition(name="big", roles=[], gpus_per_node=8),
        SitePartition(name="cpu", roles=["sandbox"]),
    ]
    return msgspec.structs.replace(SiteConfig(name="gpus", partitions=partitions), **changes)  # type: ignore[arg-type]


def test_the_plain_run_is_valid_everywhere() -> None:
    validate(make_run(), make_site())
    validate(make_run(), make_site("laptop"))
    validate(make_run("groups.trainer.gpus_per_node=4", "groups.trainer.ranks_per_node=4"), gpu_site())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name=a b", "name: expected 1 to 64 letters"),
        ("name=", "name: expected"),
        ("rollout.n_samples_per_prompt=-1", "rollout.n_samples_per_prompt = -1: expected at least 1"),
        ("rollout.temperature=0", "rollout.temperature = 0.0: expected more than 0"),
        ("rollout.top_p=1.5", "rollout.top_p = 1.5: expected at most 1"),
        ("rollout.max_weight_staleness=-1", "rollout.max_weight_staleness = -1: expected 0 or more"),
        ("rollout.max_admitted_batches=0.5", "rollout.max_admitted_batches = 0.5: expected at least 1"),
        ("control.lease_s=nan", "control.lease_s = nan: expected more than 0"),
        ("control.lost_after_s=inf", "control.lost_after_s = inf: expected at most"),
        ("rollout.max_admitted_batches=nan", "rollout.max_admitted_batches = nan: expected"),
        ("train.eps_clip=-0.1", "train.eps_clip = -0.1: expected 0 or more"),
        ("train.adam_beta2=1", "train.adam_beta2 = 1.0: expected at most"),
        ("train.minibatches_per_step=4", "train.minibatches_per_step = 4: expected at most 1"),
        ("sft.batch_size=0", "sft.batch_size = 0: expected at least 1"),
        ("seed=-1", "seed = -1: expected 0 or more"),
        ("model.init_seed=-1", "model.init_seed = -1: expected 0 or more"),
        ("job.time=banana", 'job.time = "banana": expected minutes'),
        ("job.time=00:00:00", 'job.time = "00:00:00": expected minutes'),
        ("groups.sandbox.nodes=-1", "groups.sandbox: nodes = -1: expected 0 or more"),
        ("rollout.engine=troch", "rollout.engine: no engine named 'troch': did you mean 'torch'?"),
        ("train.backend=zzz", "train.backend: no backend named 'zzz': expected one of "),
        ("rollout.custom_agent_function_path=run", "custom_agent_function_path: 'run': expected module:function"),
        (
            "rollout={custom_agent_function_path='a:b', slots_per_engine=9999}",
            "sessions.max_sessions = 4096 with rollout.engines_per_host * rollout.slots_per_engine = 9999",
        ),
        ("rollout.agent_options={a=1}", "rollout.agent_options: there is no agent to give them to"),
        ("environment.name=shel", "environment.name: no environment named 'shel': did you mean 'shell'?"),
        ("model.config={}", "model: neither is given"),
        ("model.path=/somewhere", "model: both are given"),
        ("model.tokenizer=", "model.tokenizer: needed when model.config"),
        ("model.tokenizer=/nowhere", "model.tokenizer: no tokenizer.json in /nowhere"),
        ("model.config.hidden_size=-3", "model.config.hidden_size = -3: expected a whole number"),
        ("model.config.hidden_size=abc", "model.config.hidden_size = 'abc': expected a whole number"),
        ("model.config.num_experts=0", "model.config.num_experts = 0: expected a whole number"),
        (
            "model.config={model_type='x', num_attention_heads=4, num_key_value_heads=3}",
            "expected a multiple of num_key_value_heads = 3",
        ),
        (
            "model.config={model_type='x', num_experts=2, num_experts_per_tok=3}",
            "num_experts_per_tok = 3: expected at most num_experts",
        ),
        ("model.config={a = 1}", "model.config: 'model_type' is missing"),
        ("train.row_tokens=128", "train.row_tokens = 128 is less than rollout.max_trajectory_tokens = 256"),
        ("train.max_tokens_per_microbatch=100", "train.max_tokens_per_microbatch = 100 is less than train.row_tokens"),
        ("control.lost_after_s=0.5", "control.lost_after_s = 0.5 must be more than control.heartbeat_interval_s"),
        ("job.signal_s=70000", "job.signal_s = 70000: expected at most 65535"),
        ("job.account=a b", 'job.account = "a b": expected no spaces'),
        ("job.extra_directives=['exclusive']", "job.extra_directives: 'exclusive': expected an sbatch option"),
        ('job.extra_directives=["--a\\nrm"]', "job.extra_directives: "),
        ("groups.rollout.nodes=0", "groups.rollout: nodes = 0: expected at least 1"),
        ("groups.rollout.ranks_per_node=2", "groups.rollout: ranks_per_node = 2: only the trainer has ranks"),
        ("groups.trainer.gpus_per_node=1", "groups.trainer: gpus_per_node = 1, but partition 'trainer' of site"),
        ("groups.trainer.partition=tariner", "groups.trainer: site 'slurm_box' has no partition 'tariner'"),
    ],
)
def test_rules(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(make_run(override), make_site())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("groups.trainer.gpus_per_node=8", "gpus_per_node = 8, but partition 'gpu' of site 'gpus' has 4 GPUs per node"),
        ("groups.trainer.nodes=9", "nodes = 9, but partition 'gpu' of site 'gpus' has 8 nodes"),
        ("groups.rollout.cpus_per_task=65", "= 65, but partition 'gpu' of site 'gpus' has 64 CPUs per node"),
        ("groups.sandbox.gpus_per_node=1", "gpus_per_node = 1, but partition 'cpu' of site 'gpus' has 0 GPUs per node"),
    ],
)
def test_what_a_partition_has(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(make_run(override), gpu_site())
    assert message in str(caught.value)


def test_a_gpu_has_one_rank() -> None:
    run = make_run("groups.trainer.gpus_per_node=2", "groups.trainer.ranks_per_node=4")
    with pytest.raises(UserError, match=r"ranks_per_node = 4 but gpus_per_node = 2"):
        validate(run, gpu_site())


def test_the_groups_own_partition_counts() -> None:
    validate(make_run("groups.trainer.gpus_per_node=8", "groups.trainer.partition=big"), gpu_site())
    assert partition_of(gpu_site(), "trainer", GroupConfig(nodes=1, partition="big")) == gpu_site().partitions[1]
    assert partition_of(gpu_site(), "sandbox", GroupConfig(nodes=1)) == gpu_site().partitions[2]


def test_a_site_without_a_partition_for_a_role() -> None:
    site = gpu_site(partitions=[SitePartition(name="gpu", roles=["trainer", "rollout"])])
    with pytest.raises(UserError, match=r"groups.sandbox: site 'gpus' has no partition for role 'sandbox'"):
        validate(make_run(), site)
    validate(make_run("groups.sandbox.nodes=0"), site)


def test_accounts_and_layouts() -> None:
    with pytest.raises(UserError, match=r"job.account: site 'gpus' refuses jobs without an account"):
        validate(make_run(), gpu_site(requires_account=True))
    validate(make_run("job.account=proj_g"), gpu_site(requires_account=True))
    with pytest.raises(UserError, match=r"layout 'split': site 'gpus' lists no partition for all of trainer, rollout"):
        validate(make_run(), gpu_site(layout="split"))
    with pytest.raises(UserError, match=r"job.layout: site 'gpus' takes hetjob \(why\), not 'split'"):
        validate(make_run("job.layout=split"), gpu_site(layouts=["hetjob"], layouts_why="why"))


def test_trajectories_fit_into_the_model(tmp_path: Path) -> None:
    longer = ("rollout.max_trajectory_tokens=1024", "train.row_tokens=1024")
    with pytest.raises(UserError, match=r"= 1024 is more than the model's max_position_embeddings = 512"):
        validate(make_run(*longer), make_site())
    folder = tmp_path / "model"
    at = ("model.config={}", f"model.path={folder}", "model.tokenizer=")
    with pytest.raises(UserError, match=r"model.path: no config.json in .*/model: expected a Hugging Face"):
        validate(make_run(*at), make_site())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1000}))
    validate(make_run(*at), make_site())
    with pytest.raises(UserError, match=r"max_position_embeddings = 1000"):
        validate(make_run(*at, *longer), make_site())
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"can't read"):
        validate(make_run(*at), make_site())


def test_without_a_scheduler_the_machine_itself_counts() -> None:
    with pytest.raises(UserError, match=r"gpus_per_node = 1, but site 'laptop' has 0 GPUs"):
        validate(make_run("groups.trainer.gpus_per_node=1"), make_site("laptop"))


def test_memory_is_stated_for_later_components_as_well() -> None:
    with pytest.raises(UserError, match=r"groups.rollout.mem: needed because groups.trainer.mem is set"):
        validate(make_run("groups.trainer.mem=8G"), make_site())
    validate(make_run("groups.sandbox.mem=8G"), make_site())
    validate(make_run(*(f"groups.{role}.mem=8G" for role in ("trainer", "rollout", "sandbox"))), make_site())


def test_a_dotted_path_is_not_imported() -> None:
    validate(make_run("rollout.engine=no.such.module:Engine"), make_site())


def _number_keys(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for name, declared in get_type_hints(struct).items():
        if isinstance(declared, type) and issubclass(declared, msgspec.Struct):
            yield from _number_keys(declared, f"{prefix}{name}.")
        elif {int, float} & ({declared} | set(get_args(declared))):
            yield prefix + name


def test_every_number_of_a_run_file_has_a_range() -> None:
    assert {key for key in _number_keys(RunConfig) if not key.startswith("groups.")} == set(NUMBERS)


@pytest.mark.parametrize("key", sorted(NUMBERS))
def test_no_number_may_be_negative_huge_or_nan(key: str) -> None:
    declared: object = RunConfig
    for part in key.split("."):
        declared = get_type_hints(declared)[part]
    values = ["-1", "99999999999999999999999", *(["nan", "inf"] if declared is float else [])]
    for value in values:
        with pytest.raises(UserError) as caught:
            validate(make_run(f"{key}={value}"), make_site())
        assert f"{key} = " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("time", ["30", "5:00", "01:00:00", "1-12", "2-00:30", "7-00:00:00", "UNLIMITED", ""])
def test_times_that_sbatch_takes(time: str) -> None:
    validate(make_run(f"job.time={time}"), make_site())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("eval.n_episodes=8", "eval.engines_per_host=1"), "at least one engine of a host is for training"),
        (("eval.interval=5",), "eval.interval = 5, but eval.n_episodes = 0"),
        (("eval.engines_per_host=1", "rollout.engines_per_host=2"), "they would serve nothing"),
        (
            ("eval.n_episodes=8", "eval.engines_per_host=1", "rollout.engines_per_host=2", "eval.max_in_flight=2"),
            "eval.max_in_flight = 2: expected 1, because engines that serve evaluations only hold one weight version",
        ),
    ],
)
def test_evaluations_that_could_not_go_on_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(make_run(*overrides), gpu_site())
    assert message in str(caught.value)


def test_agents_do_not_reach_engines_that_are_set_aside() -> None:
    settings = ("eval.n_episodes=8", "eval.engines_per_host=1", "rollout.engines_per_host=2")
    with pytest.raises(UserError, match="agents' sessions go to the engines for training alone"):
        validate(make_run(*settings, "rollout.custom_agent_function_path=agents:play"), gpu_site())


def test_evaluations_may_have_engines_of_their_own() -> None:
    validate(make_run("eval.n_episodes=8", "eval.engines_per_host=1", "rollout.engines_per_host=2"), gpu_site())
