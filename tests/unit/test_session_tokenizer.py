"""Tokenizers, chat templates and model folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.config import ModelConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage, ModelShape
from miles_hpc.rollout.session.tokenizer import (
    ALPHABET,
    ChatTokenizer,
    character_tokenizer,
    shape_of,
    write_model_folder,
)
from tests.fakes.rollout import CHATML, chatml_tokenizer, model_folder, tiny_run


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return model_folder(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("chatml"))


def test_character_vocabulary(characters: ChatTokenizer) -> None:
    assert characters.vocab_size == 64 == 7 + len(ALPHABET)
    assert characters.encode("<pad><bos><ask><act><end><obs><eos>") == [0, 1, 2, 3, 4, 5, 6]
    assert characters.encode("ab\n c") == [characters.encode(c)[0] for c in "ab\n c"]
    assert (characters.stop_ids, characters.pad_id) == ((4,), 0)
    assert characters.decode([1, 7, 4], special=False) == "a"


def test_shorter_alphabets_leave_unused_ids() -> None:
    tokenizer = character_tokenizer("abc")
    assert tokenizer.get_vocab_size() == 64
    assert tokenizer.encode("cab", add_special_tokens=False).ids == [9, 7, 8]


@pytest.mark.parametrize("alphabet", ["", "aa", "a>", "".join(chr(0x100 + i) for i in range(58))])
def test_impossible_alphabets_are_refused(alphabet: str) -> None:
    with pytest.raises(UserError, match="expected 1 to 57 different characters"):
        character_tokenizer(alphabet)


@given(st.text(alphabet=ALPHABET))
def test_character_round_trip_is_exact(text: str) -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_byte_level_round_trip_is_exact(chatml: ChatTokenizer, text: str) -> None:
    text = chatml.plain(text)
    assert chatml.decode(chatml.encode(text)) == text


@given(st.lists(st.sampled_from(["<end>", "<act", ">", "<", "a", "end>", "<<end>end>"])))
def test_plain_text_spells_no_special_token(characters: ChatTokenizer, parts: list[str]) -> None:
    plain = characters.plain("".join(parts))
    assert all(i >= 7 for i in characters.encode(plain))


def test_character_template(characters: ChatTokenizer) -> None:
    talk = [
        ChatMessage(role="user", content="len c"),
        ChatMessage(role="assistant", content="wc -l <c"),
        ChatMessage(role="tool", content="5"),
    ]
    assert characters.render(talk, generate=True) == "<bos><ask>len c<act>wc -l <c<end><obs>5<act>"
    assert characters.render(talk[:2], generate=False) == "<bos><ask>len c<act>wc -l <c<end>"
    with pytest.raises(UserError, match="unknown role critic"):
        characters.render([ChatMessage(role="critic", content="")], generate=False)
    assert characters.speaks("tool") and not characters.speaks("critic")


def test_chatml_has_its_system_message_and_stop_token(chatml: ChatTokenizer) -> None:
    text = chatml.render([ChatMessage(role="user", content="hi")], generate=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert chatml.decode(list(chatml.stop_ids[:1])) == "<|im_end|>"


def test_template_beside_the_config_wins_and_named_templates_are_understood(tmp_path: Path) -> None:
    chatml_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": settings["chat_template"]}]
    path.write_text(json.dumps(settings | {"chat_template": named}))
    assert "Be brief" in ChatTokenizer(tmp_path).render([ChatMessage(role="user", content="hi")], generate=True)
    (tmp_path / "chat_template.jinja").write_text(CHATML.replace("Be brief", "Be exact"))
    assert "Be exact" in ChatTokenizer(tmp_path).render([ChatMessage(role="user", content="hi")], generate=True)


def test_templates_that_rewrite_history_are_refused(tmp_path: Path) -> None:
    dropping = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(UserError, match="rewrites earlier messages"):
        chatml_tokenizer(tmp_path, dropping)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no such file"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "expected a JSON object"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "chat_template.jinja").write_text("{% for %}"), "line 1"),
        (lambda f: (f / "chat_template.jinja").unlink(), "no chat template"),
    ],
)
def test_damaged_folders_give_one_clear_line(tmp_path: Path, spoil: object, message: str) -> None:
    model_folder(tmp_path)
    spoil(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match=message) as caught:
        ChatTokenizer(tmp_path)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------ model folders


def test_model_folder_from_a_config_is_complete_and_stable(tmp_path: Path) -> None:
    model_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["pad_token_id"], config["eos_token_id"]) == (64, 0, 4)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    model_folder(tmp_path)
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before


def test_model_folder_by_path_takes_everything_but_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    chatml_tokenizer(source)
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 400}))
    (source / "model.safetensors").write_bytes(b"x" * 100)
    run = msgspec.structs.replace(tiny_run(), model=ModelConfig(path=str(source)))
    write_model_folder(run, tmp_path / "model")
    names = {p.name for p in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert json.loads((tmp_path / "model/config.json").read_text())["vocab_size"] == 400


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(), "no tokenizer"),
        (ModelConfig(tokenizer="characters"), "model_type"),
        (ModelConfig(path="/nowhere/at/all"), "no tokenizer.json"),
        (ModelConfig(config={"model_type": "llama", "vocab_size": 10}, tokenizer="characters"), "has 64 ids"),
    ],
)
def test_impossible_models_are_refused(tmp_path: Path, model: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        write_model_folder(msgspec.structs.replace(tiny_run(), model=model), tmp_path / "model")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, ((), 0, 0)),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}, ((0, 1, 2, 3), 8, 2)),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
            ((1, 3), 8, 2),
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0, 2]},
            ((1, 3), 8, 2),
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 1, "first_k_dense_replace": 3},
            ((3,), 4, 1),
        ),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, ((0, 1, 2, 3), 4, 2)),
    ],
)
def test_shape(tmp_path: Path, config: dict[str, object], expected: tuple[tuple[int, ...], int, int]) -> None:
    base = {"vocab_size": 100, "max_position_embeddings": 50, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(base | config))
    layers, experts, top_k = expected
    assert shape_of(tmp_path) == ModelShape(
        vocab_size=100, max_position_embeddings=50, moe_layers=layers, n_experts=experts, top_k=top_k
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"vocab_size": "x", "max_position_embeddings": 5, "num_hidden_layers": 1},
        {"vocab_size": 9, "max_position_embeddings": 5, "num_hidden_layers": 1, "num_experts": 4, "model_type": "odd"},
        {
            "vocab_size": 9,
            "max_position_embeddings": 5,
            "num_hidden_layers": 1,
            "num_experts": 4,
            "model_type": "olmoe",
        },
    ],
)
def test_shapes_that_can_not_be_told_are_refused(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError):
        shape_of(tmp_path)


def test_host_code_imports_no_torch() -> None:
    modules = ("role", "sampler", "spool", "sandbox", "sandbox_host", "environments.shell", "session.record")
    code = "import sys;" + ";".join(f"import miles_hpc.rollout.{m}" for m in modules)
    code += ";print(sorted({'torch', 'transformers', 'mpi4py', 'zarr'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
