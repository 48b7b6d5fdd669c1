"""The command line: bad input is one line and exit code 2 with nothing written; help is light."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.journal import JournalWriter, RunCompleted, TermStarted
from checkpoints.manifest import Counters, JournalPosition, Manifest, extend_lineage, publish_manifest
from miles_hpc.cli.inputs import complete_at
from miles_hpc.cli.main import main
from miles_hpc.cluster.submit import prepare
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths
from tests.unit.runs import make_run, make_site, write_run

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with run.toml, on a machine without Slurm and without sites of its own."""
    (tmp_path / "bin").mkdir()
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("MILES_HPC_", "SLURM_"))]:
        monkeypatch.delenv(name)
    yield tmp_path


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


BAD_INPUT = {
    "unknown key": (
        ["--set", "rollout.rolout_batch_size=3"],
        "unknown key 'rollout.rolout_batch_size': did you mean 'rollout_batch_size'?",
    ),
    "wrong type": (["--set", "rollout.n_steps=ten"], "'rollout.n_steps' = \"ten\": expected int, seen str"),
    "value out of range": (["--set", "train.eps_clip=-0.2"], "train.eps_clip = -0.2: expected 0 or more"),
    "option that the environment lacks": (["--set", "environment.options.foo=1"], "unknown field `foo`"),
    "agent function that its module lacks": (
        ["--set", "rollout.custom_agent_function_path=miles_hpc.recipes.agents:play_turn"],
        "custom_agent_function_path: function 'miles_hpc.recipes.agents:play_turn': the module has no 'play_turn': "
        "did you mean 'play_turns'?",
    ),
    "run directory below a file": (["--run-dir", "run.toml/run"], "run.toml is a file: choose another"),
    "malformed --set": (["--set", "rollout.n_steps"], "--set rollout.n_steps: expected key=value"),
    "partition that the site lacks": (
        ["--set", "groups.rollout.partition=gpu"],
        "groups.rollout: site 'slurm_box' has no partition 'gpu': its partitions are trainer, rollout, sandbox",
    ),
    "site without a partition for a role": (["--site", "mine.toml"], "site 'mine' has no partition for role 'sandbox'"),
    "more GPUs per node than the site has": (
        ["--set", "groups.trainer.gpus_per_node=9", "--site", "generic_h100_ib"],
        "groups.trainer: gpus_per_node = 9, but partition 'gpu' of site 'generic_h100_ib' has 8 GPUs per node",
    ),
    "missing model folder": (
        ["--set", "model.config={}", "--set", "model.path=models/none"],
        "models/none: expected a Hugging Face model folder",
    ),
    "vocabulary smaller than the tokenizer's": (["--set", "model.config.vocab_size=3"], "vocab"),
    "unknown site": (["--site", "slurm_bax"], "no site named 'slurm_bax'"),
    "site without a scheduler": (["--site", "laptop"], "site 'laptop' has no scheduler"),
    "run directory of another run": (["--run-dir", "taken"], "belongs to run 'other', not 'tiny'"),
    "run directory that is not ours": (["--run-dir", "bin/.."], "is not empty and has no identity.json"),
    "--json without --dry-run": (["--json"], "--json: shows what a dry run shows: add --dry-run"),
    "no Slurm on the machine": ([], "no Slurm on this machine: 'sbatch' is not on PATH"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = BAD_INPUT[case]
    (here / "mine.toml").write_text('name = "mine"\n[[partitions]]\nname = "gpu"\nroles = ["trainer", "rollout"]\n')
    prepare(make_run("name=other"), make_site(), RunPaths(here / "taken"), source="x")
    before = tree(here)
    assert main(["submit", "run.toml", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("miles-hpc: error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert tree(here) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "nothing.toml"], "nothing.toml: no such run file or recipe"),
        (["status", "runs/none"], "runs/none: no such run directory, run file or recipe"),
        (["status", "bin"], "is not a run directory: identity.json is missing"),
        (["cancel", "run.toml"], "is not a run directory"),
        (["resume", "bin"], "is not a run directory"),
        (["report", "bin"], "is not a run directory"),
        (["watch", "bin"], "is not a run directory"),
        (["sites", "show", "nope"], "no site named 'nope'"),
        (["sites", "check"], "no site chosen"),
        (["local", "run.toml", "--site", "slurm_box"], "site 'slurm_box' has a scheduler: use 'miles-hpc submit'"),
    ],
)
def test_other_commands(arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(here)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert tree(here) == before


@pytest.mark.parametrize("arguments", [[], ["launch"], ["submit"], ["submit", "run.toml", "--sites", "x"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("miles-hpc: error: ") and said.count("\n") == 1 and "--help` says what there is" in said


def test_syntax_error_and_garbled_environment(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "broken.toml").write_text("name = \n")
    assert main(["submit", "broken.toml"]) == 2
    assert "broken.toml: line 1: TOML syntax" in capsys.readouterr().err
    monkeypatch.setenv("MILES_HPC_SITE", "zzz")
    assert main(["render", "run.toml"]) == 2
    assert "no site named 'zzz'" in capsys.readouterr().err
    assert main(["render", "run.toml", "--site", "slurm_box"]) == 0


def test_render_prints_the_script_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(here)
    assert main(["render", "run.toml", "--set", "job.time=00:30:00", "--run-dir", "out"]) == 0
    text = capsys.readouterr().out
    assert text.count("#SBATCH --time=00:30:00") == 3
    assert f"--run-dir {here}/out &" in text
    assert tree(here) == before


@pytest.mark.parametrize(
    ("host", "cluster", "code", "said"),
    [
        ("jpbo-001-04", "", 0, "jupiter  host jpbo-001-04 matches"),
        ("jwb0001.juwels", "", 0, "juwels_booster  host jwb0001 matches"),
        ("n1", "vista", 0, "vista  Slurm's cluster is called 'vista'"),
        ("n1", "", 1, "no site file matches host n1: choose one by MILES_HPC_SITE"),
        ("lrdn0012", "", 0, "leonardo  host lrdn0012 matches"),
        ("frontier00001", "", 0, "frontier  host frontier00001 matches"),
        ("jwb0001", "vista", 1, "several sites match"),
    ],
)
def test_sites_detect(
    here: Path,
    host: str,
    cluster: str,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster)
    assert main(["sites", "detect"]) == code
    out, err = capsys.readouterr()
    assert said in out + err


def test_sites_detect_by_a_variable(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "login07")
    monkeypatch.setenv("NERSC_HOST", "perlmutter")
    assert main(["sites", "detect"]) == 0
    assert capsys.readouterr().out == "perlmutter  NERSC_HOST is 'perlmutter'\n"
    monkeypatch.setenv("NERSC_HOST", "cori")
    assert main(["sites", "detect"]) == 1


def test_sites_list_and_show(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = here / "sites"
    own.mkdir()
    (own / "mine.toml").write_text('name = "mine"\ntitle = "My cluster"\n')
    monkeypatch.setenv("MILES_HPC_SITES", str(own))
    assert main(["sites", "list"]) == 0
    listed = capsys.readouterr().out
    assert "My cluster" in listed
    assert re.search(r"^vista +slurm +1 x GH200 96 GB +hetjob\? +facts of 2026-08-22 +TACC Vista", listed, re.MULTILINE)
    assert re.search(r"^slurm_box +slurm +no GPUs +hetjob hetjob_span split split_span +facts of", listed, re.MULTILINE)
    assert main(["sites", "show", "mine"]) == 0
    assert 'title = "My cluster"' in capsys.readouterr().out
    assert main(["sites", "check", "mine"]) == 1
    checked = capsys.readouterr().out
    assert "FAIL  no partition for role 'sandbox'" in checked
    assert "skip  partitions and version are not compared: no Slurm on this machine" in checked
    assert "open  node.gpu: not known" not in checked  # a site without GPUs
    assert "open  fabric.kind: not known" in checked
    assert main(["sites", "check", "vista"]) == 0  # the file alone is in order
    assert "ok    vista: the file is valid" in capsys.readouterr().out
    assert main(["sites", "show", "vista"]) == 0
    shown = capsys.readouterr().out
    assert tomllib.loads(shown)["sbatch"]["mem"] == "forbidden"
    assert "# Not known:" in shown and "#   userns" in shown


def test_status_without_slurm(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(here / "runs" / "tiny")
    prepare(make_run(), make_site(), paths, source="x")
    assert main(["status", "run.toml"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^job +NOT SUBMITTED$", shown, re.MULTILINE)
    assert "none of 100 yet" in shown
    paths.job.write_text('{"job_id": 5}')
    paths.attempt(1).mkdir()
    (paths.attempt(1) / "outcome.json").write_text('{"outcome": "failed", "reason": "trainer-t1 lost"}')
    paths.events.mkdir()
    (paths.events / "c.jsonl").write_text(
        '{"t": 1, "kind": "metric", "step": 7, "values": {}}\n'
        '{"t": 2, "kind": "verdict", "name": "lost", "peer": "r1"}\n'
    )
    assert main(["status", str(paths.root)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^job +5 UNKNOWN: Slurm doesn't answer \(no Slurm on this machine\); ", shown, re.MULTILINE)
    assert "7 of 100" in shown
    assert re.search(r"^ +0001 +failed, trainer-t1 lost", shown, re.MULTILINE)
    assert "lost r1" in shown


def test_local_prepares_the_run_and_becomes_its_launcher(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environ: started.append((command, environ)))
    monkeypatch.setenv("MILES_HPC_SITE", "slurm_box")  # for jobs; this machine is meant here
    main(["local", "run.toml", "--set", "rollout.n_steps=3"])
    paths = RunPaths(here / "runs" / "tiny")
    (command, environ), *rest = started
    assert command == [sys.executable, "-P", "-m", "launchers.local", "--run-dir", str(paths.root)]
    assert environ["PYTHONPATH"] == str(REPOSITORY)
    assert rest == []
    run, site = load_prepared(paths.root)
    assert (run.rollout.n_steps, run.site, site.scheduler) == (3, "laptop", "none")
    assert (paths.model / "config.json").is_file()
    assert not paths.job_script.exists()


def test_a_recipe_is_found_by_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import miles_hpc.recipes

    recipes = here / "recipes"
    recipes.mkdir()
    (recipes / "small.toml").write_text((here / "run.toml").read_text())
    monkeypatch.setattr(miles_hpc.recipes, "__path__", [str(recipes)])
    assert main(["render", "small"]) == 0
    assert main(["render", "smal"]) == 2


def test_doctor(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "no Slurm on this machine" in capsys.readouterr().out


def test_a_run_directory_that_cannot_be_made(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "run.toml", "--run-dir", "run.toml/below"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("miles-hpc: error: ")
    assert printed.count("\n") == 1


def test_interrupts_and_debugging(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_hpc.cli import doctor
    from miles_hpc.core.errors import UserError

    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupt)
    assert main(["doctor"]) == 130
    monkeypatch.setenv("MILES_HPC_DEBUG", "1")
    with pytest.raises(UserError):
        main(["sites", "show", "nope"])


HEAVY = (
    "torch",
    "mpi4py",
    "transformers",
    "numpy",
    "jinja2",
    "rich",
    "zarr",
    "h5py",
    "matplotlib",
    "tokenizers",
    "aiohttp",
)


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom miles_hpc.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_status_imports_nothing_heavy() -> None:
    program = f"import sys, miles_hpc.cli.status\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_a_complete_run_is_not_submitted_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    paths = RunPaths(here / "done")
    prepare(run, make_site(), paths, source="", job_text="#!/bin/bash\n")
    last = run.sft.steps + run.rollout.n_steps
    with JournalWriter.create(paths.journal, TermStarted(term=1, attempt=1)) as journal:
        manifest = Manifest(
            run=run.name,
            term=1,
            step=last,
            attempt=1,
            lineage=extend_lineage((), 1, last),
            counters=Counters(next_group_id=0),
            journal=JournalPosition(term=1, offset=journal.offset),
            files={},
        )
        folder = paths.checkpoint(1, last)
        folder.mkdir(parents=True)
        publish_manifest(folder, manifest, lambda: None)
        assert complete_at(run, paths) is None  # saved, but the evaluation at the end was still to come
        journal.append(RunCompleted(step=last))
    before = tree(here)
    assert main(["resume", str(paths.root)]) == 0
    assert f"complete at step {last}" in capsys.readouterr().out
    assert tree(here) == before
    assert complete_at(make_run(f"rollout.n_steps={last + 1}"), paths) is None


def test_a_dry_run_needs_no_slurm(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a laptop, for a site far away; what Slurm would say of it is said to be missing."""
    monkeypatch.setenv("PATH", str(here))
    more = ["--set", "job.account=proj", "--set", "groups.rollout.nodes=3"]
    assert main(["submit", str(write_run(here)), "--site", "leonardo", "--dry-run", *more]) == 0
    shown = capsys.readouterr()
    assert "#SBATCH --account=proj" in shown.out
    assert shown.err.startswith("not shown to Slurm, whose word counts: no Slurm on this machine: 'sbatch'")
    assert re.search(r"^rollout +3 nodes", shown.err, re.MULTILINE)
    assert main(["submit", str(write_run(here)), "--site", "leonardo", *more]) == 2
    assert not (here / "runs").exists()


def test_a_broken_site_file_hides_no_other(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = here / "sites"
    own.mkdir()
    (own / "bad.toml").write_text('name = "bad"\ninherits = "slurm_bx"\n')
    monkeypatch.setenv("MILES_HPC_SITES", str(own))
    assert main(["sites", "list"]) == 2
    shown = capsys.readouterr()
    assert re.search("^vista ", shown.out, re.MULTILINE)
    assert shown.err.startswith("miles-hpc: left out: ") and "slurm_bx" in shown.err
