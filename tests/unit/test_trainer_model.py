"""Where the policy's weights come from."""

from __future__ import annotations

import json

import msgspec
import pytest

from miles_hpc.core.config import ModelConfig
from miles_hpc.core.errors import UserError
from tests.conformance.training_task import MOE, run_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from miles_hpc.trainer.fsdp import device_index  # noqa: E402
from miles_hpc.trainer.model import _weights, decoder_layers, load_model  # noqa: E402


def weights(model):
    return dict(model.named_parameters())


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def with_model(**fields):
    return msgspec.structs.replace(run_config(), model=ModelConfig(**fields))


def test_seed_decides_and_the_callers_generator_is_left_alone(tmp_path):
    torch.manual_seed(5)
    first = weights(load_model(with_model(config=MOE, init_seed=1), tmp_path))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert same(first, weights(load_model(with_model(config=MOE, init_seed=1), tmp_path)))
    assert not same(first, weights(load_model(with_model(config=MOE, init_seed=2), tmp_path)))
    assert same(weights(load_model(with_model(config=MOE), tmp_path)), weights(load_model(run_config(), tmp_path)))


def test_the_run_directorys_description_counts(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**MOE, "num_hidden_layers": 1}))
    assert len(decoder_layers(load_model(run_config(), tmp_path))) == 1


def test_a_safetensors_folder_loads_back_equal(tmp_path):
    model = load_model(run_config(), tmp_path)
    model.save_pretrained(tmp_path / "saved")
    loaded = load_model(with_model(path=str(tmp_path / "saved")), tmp_path)
    assert same(weights(model), weights(loaded))
    assert next(iter(weights(loaded).values())).dtype == torch.float32


def test_gguf_files_are_found(tmp_path):
    (tmp_path / "a.gguf").touch()
    assert _weights(tmp_path)["gguf_file"] == "a.gguf"
    assert _weights(tmp_path / "a.gguf") == {"pretrained_model_name_or_path": tmp_path, "gguf_file": "a.gguf"}
    (tmp_path / "b.gguf").touch()
    with pytest.raises(UserError, match="2 GGUF files"):
        _weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert "gguf_file" not in _weights(tmp_path)


@pytest.mark.parametrize("fields", [{"config": {"model_type": "nothing"}}, {"config": {}}, {"path": "/nowhere"}])
def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path, fields):
    with pytest.raises(UserError) as caught:
        load_model(with_model(**fields), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "visible", "device"), [(0, 4, 0), (3, 4, 3), (0, 1, 0), (3, 1, 0), (5, 8, 5), (1, 2, 1)]
)
def test_a_rank_takes_its_own_device_or_the_only_one_that_it_sees(rank: int, visible: int, device: int) -> None:
    assert device_index(rank, visible) == device
