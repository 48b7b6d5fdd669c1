"""A checkpoint of a real world of two ranks, exported, compared, loaded by transformers, and evaluated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from checkpoints.manifest import Counters, JournalPosition, Manifest, extend_lineage, publish_manifest
from checkpoints.verify import file_entry
from miles_hpc.cli.main import main
from miles_hpc.cluster.submit import prepare
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import IntegrityError, UserError
from miles_hpc.core.load import load_prepared
from miles_hpc.core.paths import RunPaths
from tests.conformance.training_task import fake_routing, run_world
from tests.unit.runs import make_run, make_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]
pytest.importorskip("torch")
pytest.importorskip("transformers")

#: Fused experts, tied weights: what transformers stores in another form than it holds.
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}


def _run() -> RunConfig:
    run = make_run(
        "site=laptop",
        "rollout.max_trajectory_tokens=192",
        "eval.n_episodes=6",
        "rollout.slots_per_engine=4",
        "rollout.engine_batch_invariant=true",
    )
    return msgspec.structs.replace(run, model=msgspec.structs.replace(run.model, config=MODEL))


def _save(rank: int, size: int, store: Any, folder: Path) -> dict[str, np.ndarray]:
    """Weights of another seed than the run's, so that a model made anew isn't the checkpoint's; then rank 0's view."""
    from miles_hpc.trainer.fsdp import FsdpBackend

    paths = RunPaths(folder.parent / "run")
    run, _ = load_prepared(paths.root)
    backend = FsdpBackend(
        msgspec.structs.replace(run, seed=99),
        paths.root,
        store=store,
        rank=rank,
        world_size=size,
        local_rank=rank,
        timeout_s=60.0,
        read_routed_experts=fake_routing,
    )
    backend.save(paths.checkpoint(1, 7)).result()
    exported = [t for t in backend.export_weights() if len(t.data)]  # rank 0 has the data
    return {t.name: np.frombuffer(t.data, np.float32).reshape(t.shape).copy() for t in exported}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, dict[str, np.ndarray]]:
    """A prepared run with one complete checkpoint, and the weights that it holds."""
    from miles_hpc.cli.inputs import materialise_model

    folder = tmp_path_factory.mktemp("export")
    paths = RunPaths(folder / "run")
    prepare(_run(), make_site("laptop"), paths, source="", materialise=materialise_model)
    paths.checkpoint(1, 7).mkdir(parents=True)
    weights = run_world(2, folder / "world", _save)[0]
    checkpoint = paths.checkpoint(1, 7)
    manifest = Manifest(
        run="tiny",
        term=1,
        step=7,
        attempt=1,
        lineage=extend_lineage((), 1, 7),
        counters=Counters(next_group_id=0),
        journal=JournalPosition(term=1, offset=0),
        files={file.name: file_entry(file, digest=True) for file in sorted(checkpoint.iterdir())},
    )
    publish_manifest(checkpoint, manifest, lambda: None)
    return paths, weights


def test_an_export_is_the_checkpoint(trained: tuple[RunPaths, dict[str, np.ndarray]], tmp_path: Path) -> None:
    import torch
    import transformers

    from miles_hpc.trainer.export import export_checkpoint

    paths, weights = trained
    told = export_checkpoint(str(paths.root), output=str(tmp_path / "whole"))
    assert (told["step"], told["tensors"], told["dtype"]) == (7, len(weights), "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    read = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert read.keys() == weights.keys()
    assert all(np.array_equal(read[name], weights[name]) for name in weights)
    assert told["parameters"] == sum(array.size for array in weights.values())
    files = {file.name for file in (tmp_path / "whole").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert [path.name for path in tmp_path.iterdir()] == ["whole"], "nothing beside it"

    export_checkpoint(str(paths.root), output=str(tmp_path / "half"), dtype="bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    name = next(iter(weights))
    rounded = torch.from_numpy(weights[name]).to(torch.bfloat16)
    assert torch.equal(dict(half.named_parameters())[name], rounded)


def test_what_is_there_is_compared(trained: tuple[RunPaths, dict[str, np.ndarray]], tmp_path: Path) -> None:
    from miles_hpc.trainer.export import export_checkpoint

    paths, _ = trained
    place = tmp_path / "export"
    first = export_checkpoint(str(paths.root), output=str(place))
    assert export_checkpoint(str(paths.root), output=str(place)) == first
    file = place / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="differs from the checkpoint's"):
        export_checkpoint(str(paths.root), output=str(place))
    for arguments, says in (
        ({"step": 8}, "no checkpoint of step 8"),
        ({"dtype": "int4"}, "expected one of float32"),
        ({"output": "here"}, "absolute path"),
    ):
        with pytest.raises(UserError, match=says):
            export_checkpoint(str(paths.root), **arguments)  # type: ignore[arg-type]


def test_a_broken_checkpoint_is_not_exported(trained: tuple[RunPaths, dict[str, np.ndarray]], tmp_path: Path) -> None:
    from miles_hpc.trainer.export import _read_weights
    from miles_hpc.trainer.model import load_model

    paths, _ = trained
    run, _ = load_prepared(paths.root)
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in paths.checkpoint(1, 7).iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:100])
    with pytest.raises(IntegrityError, match="can't be read"):
        _read_weights(broken, load_model(run, paths.root))


def test_evaluated_as_a_side_job(
    trained: tuple[RunPaths, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line: exported, and played on this machine in real sandboxes; the same twice."""
    paths, _ = trained
    told = []
    for _ in range(2):
        assert main(["side", str(paths.root), "eval", "--local", "--wait", "150"]) == 0, capsys.readouterr().err
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert (told[0]["step"], told[0]["episodes"]) == (7, 6)
    assert 0.0 <= told[0]["mean"] <= 1.0 and told[0]["sampled_tokens"] > 0
    assert sum(told[0]["by_label"].values()) >= 0.0 and told[0]["by_label"]
    assert (paths.exports / paths.checkpoint(1, 7).name / "model.safetensors").is_file()
    assert main(["side", str(paths.root), "export", "--wait", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == told[0]["folder"]


def test_an_agent_is_evaluated_as_the_sampler_is(trained: tuple[RunPaths, dict[str, np.ndarray]]) -> None:
    """The same tokens, so the same numbers, through a session server of the evaluation's own."""
    pytest.importorskip("openai")
    from miles_hpc.rollout.evaluate import _evaluate

    paths, _ = trained
    assert main(["side", str(paths.root), "export", "--local", "--wait", "150"]) == 0
    run, site = load_prepared(paths.root)
    agent = {"custom_agent_function_path": "miles_hpc.recipes.agents:play_turns"}
    told = []
    for changes in ({}, agent):
        rollout = msgspec.structs.replace(run.rollout, max_turns=4, engine_batch_invariant=True, **changes)
        changed = msgspec.structs.replace(run, rollout=rollout)
        folder = paths.exports / paths.checkpoint(1, 7).name
        told.append(asyncio.run(_evaluate(changed, site, paths, folder, 6, "cpu", 1)))
    assert told[0] == told[1] and told[0]["sampled_tokens"] > 0


def test_numbers_of_an_evaluation() -> None:
    from types import SimpleNamespace

    from miles_hpc.core.types import SampleStatus
    from miles_hpc.rollout.evaluate import summary

    def played(rollout: int, reward: float, status: SampleStatus = SampleStatus.COMPLETED) -> Any:
        return SimpleNamespace(rollout=rollout, reward=reward, status=status, record=SimpleNamespace(n_sampled=3))

    branches = [played(0, 1.0), played(0, 1.0), played(1, 0.5)]
    told = summary(
        [("a", branches), ("b", [played(0, 0.0, SampleStatus.TRUNCATED), played(1, 0.5)])],
        success_reward=1.0,
    )
    assert told == {
        "episodes": 4,
        "prompts": 2,
        "mean": 0.5,
        "by_label": {"a": 0.75, "b": 0.25},
        "pass_at": {"1": 0.25, "2": 0.5},
        "truncated": 1,
        "sampled_tokens": 15,
    }
