"""Run and site files: every error names the key, what was seen and the way out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.config import RolloutConfig, RunConfig, SiteConfig, TrainConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.load import (
    load_prepared,
    load_run,
    load_site,
    parse,
    resolved_toml,
    site_names,
    with_absolute_paths,
)
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_run, make_site, write_run


def run_text(body: str) -> str:
    return f'name = "t"\n{body}\n[groups]\ntrainer = {{nodes = 1}}\nrollout = {{nodes = 1}}\nsandbox = {{nodes = 1}}\n'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "[model]\n[rollout]\nrolout_batch_size = 4",
            "run.toml: unknown key 'rollout.rolout_batch_size': did you mean 'rollout_batch_size'?",
        ),
        ("[model]\npth = 'x'", "run.toml: unknown key 'model.pth': did you mean 'path'?"),
        ("trian = 1\n[model]", "run.toml: unknown key 'trian': did you mean 'train'?"),
        ("eps_clip = 1\n[model]", "run.toml: unknown key 'eps_clip': did you mean 'train.eps_clip'?"),
        ("[model]\n[rollout]\nzzzz = 4", "run.toml: unknown key 'rollout.zzzz': expected one of agent_options, "),
        ("[model]\n[rollout]\nn_steps = 'ten'", "run.toml: 'rollout.n_steps' = \"ten\": expected int, seen str"),
        ("[model]\n[rollout]\nn_steps = 1.5", "run.toml: 'rollout.n_steps' = 1.5: expected int, seen float"),
        ("[model]\n[rollout]\nrouting_replay = 1", "run.toml: 'rollout.routing_replay' = 1: expected bool, seen int"),
        ("rollout = 3\n[model]", "run.toml: 'rollout' = 3: expected a table, seen int"),
        (
            "[model]\ndtype = 'fp8'",
            "run.toml: 'model.dtype' = \"fp8\": expected one of 'float32', 'bfloat16', seen str",
        ),
        (
            "[model]\ndtype = 'bfloat'",
            "run.toml: 'model.dtype' = \"bfloat\": expected one of 'float32', 'bfloat16', seen str: did you mean "
            "'bfloat16'?",
        ),
        (
            "[model]\n[job]\nlayout = 'hetjop'",
            "run.toml: 'job.layout' = \"hetjop\": expected one of 'hetjob', 'hetjob_span', 'split', 'split_span', '', "
            "seen str: did you mean 'hetjob'?",
        ),
        ("[model]\ninit_seed = 'x'", "run.toml: 'model.init_seed' = \"x\": expected int, seen str"),
        ("python_path = ['a', 3]\n[model]", "run.toml: 'python_path[1]' = 3: expected str, seen int"),
        ("python_path = 'a'\n[model]", "run.toml: 'python_path' = \"a\": expected a list of str, seen str"),
        ("[model]\n[job]\ntime = 01:00:00", "run.toml: 'job.time' = 01:00:00 without quotes: expected str, seen time"),
        ("", "run.toml: missing key 'model': expected a table"),
    ],
)
def test_errors_of_a_run_file(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_text(body))
    with pytest.raises(UserError) as caught:
        load_run(path)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_missing_key_inside_a_table() -> None:
    with pytest.raises(UserError, match=re.escape("run.toml: missing key 'groups.trainer.nodes': expected int")):
        parse({"name": "x", "model": {}, "groups": {"trainer": {}}}, RunConfig, "run.toml")


@pytest.mark.parametrize(("text", "line"), [("a = 1\nb = = 2\n", 2), ("a = 1\n\n\nc = [1,\n", 4), ("a = 'x\n", 1)])
def test_toml_syntax_names_file_and_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"run.toml: line {line}: TOML syntax: "):
        load_run(path)


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file"):
        load_run(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"can't be read as TOML text"):
        load_run(tmp_path / "binary.toml")
    with pytest.raises(UserError, match=r"can't be read"):
        load_run(tmp_path)


# ------------------------------------------------------------------------------------------------ --set


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.n_steps=7", "rollout.n_steps", 7),
        ("train.lr=1e-4", "train.lr", 1e-4),
        ("train.lr = 1", "train.lr", 1.0),
        ("rollout.routing_replay=false", "rollout.routing_replay", False),
        ("rollout.engine=scripted", "rollout.engine", "scripted"),
        ('rollout.engine="scripted"', "rollout.engine", "scripted"),
        ("name=12", "name", "12"),
        ("job.time=01:30:00", "job.time", "01:30:00"),
        ("job.time=1-12:30", "job.time", "1-12:30"),
        ("job.time=30", "job.time", "30"),
        ("python_path=['a', 'b']", "python_path", ["a", "b"]),
        ("job.qos=a=b", "job.qos", "a=b"),
        ("groups.trainer.nodes=4", "groups.trainer.nodes", 4),
        ("model.init_seed=3", "model.init_seed", 3),
    ],
)
def test_set(override: str, key: str, value: Any) -> None:
    found: Any = make_run(override)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_set_reaches_into_free_tables() -> None:
    run = make_run("environment.options.level=3", "environment.options.deep.name=hard", "model.config.hidden_size=64")
    assert run.environment.options == {"level": 3, "deep": {"name": "hard"}}
    assert run.model.config["hidden_size"] == 64


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n_stepz=1", "unknown key 'rollout.n_stepz': did you mean 'n_steps'?"),
        ("rollout.n_steps=many", "'rollout.n_steps' = \"many\": expected int, seen str"),
        ("rollout.n_steps", "--set rollout.n_steps: expected key=value"),
        ("=1", "--set =1: expected key=value"),
        ("a..b=1", "--set a..b=1: expected key=value"),
        ("name.x=1", "--set name.x=1: 'name' is not a table"),
        ("rollout.n_steps=1\nrollout.top_p = 2", "'rollout.n_steps' = "),
    ],
)
def test_bad_set(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_run(override)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------ resolved


def test_a_resolved_run_and_site_load_back_equal(tmp_path: Path) -> None:
    run = make_run("model.init_seed=5", "environment.options.x='a\"b'", "job.extra_directives=['--exclusive']")
    path = tmp_path / "resolved.toml"
    path.write_text(resolved_toml(run))
    assert load_run(path) == run
    for name in site_names([Path("site_configs")]):
        site = make_site(name)
        (tmp_path / f"{name}.toml").write_text(resolved_toml(site))
        assert load_site(name, [tmp_path]) == site


_OPTIONS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False), st.text(max_size=6).map(repr), st.booleans()),
    max_size=4,
)


@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    options=_OPTIONS,
    n_steps=st.integers(1, 10**9),
    lr=st.floats(allow_nan=False),
    seed=st.none() | st.integers(0, 2**60),
    directives=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=3),
)
def test_any_run_loads_back_equal(
    name: str, options: dict[str, Any], n_steps: int, lr: float, seed: int | None, directives: list[str]
) -> None:
    base = make_run()
    replace = msgspec.structs.replace
    run = replace(
        base,
        name=name,
        environment=replace(base.environment, options=options),
        rollout=RolloutConfig(n_steps=n_steps),
        train=TrainConfig(lr=lr),
        model=replace(base.model, init_seed=seed, config={"nested": {"list": [options]}}),
        job=replace(base.job, extra_directives=directives),
    )
    assert parse(tomllib.loads(resolved_toml(run)), RunConfig, "resolved.toml") == run


def test_load_prepared(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(UserError, match=r"is not a run directory: resolved.toml is missing"):
        load_prepared(paths.root)
    run, site = make_run(), make_site()
    paths.resolved_toml.write_text(resolved_toml(run))
    paths.site_toml.write_text(resolved_toml(site))
    assert load_prepared(paths.root) == (run, site)


def test_relative_folders_become_absolute() -> None:
    run = make_run(
        "model.path=models/a", "python_path=['mine']", "python.trainer=envs/t/bin/python", "python.rollout=python3.12"
    )
    fixed = with_absolute_paths(run, Path("/base"))
    assert fixed.model.path == "/base/models/a"
    assert fixed.python_path == ["/base/mine"]
    assert (fixed.python.trainer, fixed.python.rollout) == ("/base/envs/t/bin/python", "python3.12")
    assert fixed.model.tokenizer == "characters"
    assert fixed.run_dir == ""
    assert with_absolute_paths(fixed, Path("/other")) == fixed


# ------------------------------------------------------------------------------------------------ sites


def test_a_users_folder_is_searched_first(tmp_path: Path) -> None:
    (tmp_path / "slurm_box.toml").write_text('name = "slurm_box"\ntitle = "mine"\n')
    assert load_site("slurm_box", [tmp_path, Path("site_configs")]).title == "mine"
    assert load_site("laptop", [tmp_path, Path("site_configs")]).scheduler == "none"
    assert load_site(str(tmp_path / "slurm_box.toml"), []).title == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slurm_bax", "no site named 'slurm_bax' in .*: did you mean 'slurm_box'"),
        ("zzz", "no site named 'zzz' in .*: expected one of clariden, deltaai, "),
        ("", "no site chosen: give --site"),
        ("none.toml", "none.toml: no such file"),
    ],
)
def test_unknown_sites(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_site(name, [Path("site_configs")])


def test_a_site_is_called_like_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "yours"\n')
    with pytest.raises(UserError, match='name = "yours", expected "mine"'):
        load_site("mine", [tmp_path])


def test_errors_inside_lists_of_tables() -> None:
    with pytest.raises(UserError, match=re.escape("s.toml: unknown key 'partitions[1].rolez': did you mean 'roles'?")):
        parse({"name": "s", "partitions": [{"name": "a", "roles": []}, {"rolez": 1}]}, SiteConfig, "s.toml")
    with pytest.raises(UserError, match=re.escape("s.toml: 'partitions[0].nodes' = \"x\": expected int, seen str")):
        parse({"name": "s", "partitions": [{"name": "a", "roles": [], "nodes": "x"}]}, SiteConfig, "s.toml")
    with pytest.raises(UserError, match=re.escape("s.toml: 'env[...]' = ")):
        parse({"name": "s", "env": {"A": 1}}, SiteConfig, "s.toml")


def test_the_run_file_of_the_tests_is_valid(tmp_path: Path) -> None:
    assert load_run(write_run(tmp_path)) == make_run()
