"""The token record: token-exact over turns, whatever the tokenizer makes of the text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.types import ChatMessage, FinishReason, SampleStatus, VersionSpan, WeightVersion
from miles_hpc.rollout.engine import Generation
from miles_hpc.rollout.session.record import SessionRecord
from miles_hpc.rollout.session.tokenizer import ALPHABET, ChatTokenizer
from tests.fakes.rollout import CHATML, chatml_tokenizer, model_folder

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return model_folder(tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("chatml"))


@pytest.fixture(params=["characters", "chatml"])
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    found: ChatTokenizer = request.getfixturevalue(request.param)
    return found


def generation(
    ids: list[int],
    *,
    reason: FinishReason = FinishReason.STOP,
    versions: tuple[VersionSpan, ...] | None = None,
    rows: int | None = None,
) -> Generation:
    if versions is None:
        versions = (VersionSpan(version=V1, start=0, end=len(ids)),) if ids else ()
    return Generation(
        output_ids=np.asarray(ids, np.int32),
        log_probs=np.linspace(-1, -2, len(ids), dtype=np.float32),
        versions=versions,
        finish_reason=reason,
        routed_experts=None if rows is None else np.zeros((rows, 2, 2), np.uint8),
        cached_tokens=0,
    )


def said(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def result(record: SessionRecord) -> dict[str, np.ndarray]:
    t = record.to_trajectory(group_id=1, index=0, reward=1.0, status=SampleStatus.COMPLETED)
    return {name: getattr(t, name).numpy() for name in ("tokens", "loss_mask", "log_probs")}


TURNS = st.lists(
    st.tuples(st.text(alphabet=ALPHABET, max_size=12), st.text(alphabet=ALPHABET, max_size=12)), max_size=4
)


@given(prompt=st.text(alphabet=ALPHABET, max_size=10), turns=TURNS, last=st.text(alphabet=ALPHABET, max_size=8))
def test_decodes_to_the_templates_render(
    characters: ChatTokenizer, chatml: ChatTokenizer, prompt: str, turns: list[tuple[str, str]], last: str
) -> None:
    for tokenizer in (characters, chatml):
        record = SessionRecord(tokenizer, [said("user", prompt)])
        talk = [said("user", prompt)]
        n_sampled = 0
        for text, output in turns:
            ids = [*tokenizer.encode(text), tokenizer.stop_ids[0]]
            n_sampled += len(ids)
            assert record.append_generation(generation(ids)) == text
            record.append_messages([said("tool", output)])
            talk += [said("assistant", text), said("tool", output)]
            assert record.text() == tokenizer.render(talk, generate=True)
        ids = [*tokenizer.encode(last), tokenizer.stop_ids[0]]
        record.append_generation(generation(ids))
        talk.append(said("assistant", last))
        whole = tokenizer.render(talk, generate=False)
        assert whole.startswith(record.text()) and whole[len(record.text()) :].strip() == ""
        assert record.messages == talk
        assert record.n_sampled == n_sampled + len(ids)


@given(data=st.data())
def test_sampled_tokens_are_never_retokenised(chatml: ChatTokenizer, data: st.DataObject) -> None:
    """Tokens that spell a text in another way than the tokenizer would, and broken UTF-8, stay as they are."""
    record = SessionRecord(chatml, [said("user", "go")])
    ordinary = st.integers(0, chatml.vocab_size - 4)  # any token but the special ones
    place = record.n_tokens
    for _ in range(data.draw(st.integers(1, 3))):
        ids = [*data.draw(st.lists(ordinary, max_size=10)), chatml.stop_ids[0]]
        record.append_generation(generation(ids))
        tokens, mask = record.input_ids(), result(record)["loss_mask"]
        assert tokens[place:].tolist() == ids and mask[place:].tolist() == [1] * len(ids)
        record.append_messages([said("user", "more")])
        suffix = chatml.decode(record.input_ids()[place + len(ids) :])
        assert suffix == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
        place = record.n_tokens


def test_mask_log_probs_versions_and_rows(characters: ChatTokenizer) -> None:
    record = SessionRecord(characters, [said("user", "top c")])
    prompt = record.n_tokens
    assert prompt == 8  # <bos> <ask> t o p _ c <act>
    first = [*characters.encode("ls"), 4]
    spans = (VersionSpan(version=V1, start=0, end=1), VersionSpan(version=V2, start=1, end=3))
    record.append_generation(generation(first, versions=spans, rows=prompt + 2))
    assert record.n_rows == prompt + 2 == record.n_tokens - 1
    record.append_messages([said("tool", "c")])
    start = record.n_tokens
    second = [*characters.encode("ans 4"), 4]
    record.append_generation(generation(second, versions=(VersionSpan(version=V2, start=0, end=6),), rows=3 + 1 + 5))
    assert record.n_rows == record.n_tokens - 1
    rows = record.routed_experts()
    assert rows is not None and rows.shape == (record.n_tokens - 1, 2, 2)
    assert record.versions == (
        VersionSpan(version=V1, start=prompt, end=prompt + 1),
        VersionSpan(version=V2, start=prompt + 1, end=prompt + 3),
        VersionSpan(version=V2, start=start, end=start + 6),
    )
    arrays = result(record)
    assert arrays["loss_mask"].tolist() == [0] * prompt + [1] * 3 + [0] * 3 + [1] * 6
    assert (arrays["tokens"].dtype, arrays["loss_mask"].dtype, arrays["log_probs"].dtype) == (
        np.int32,
        np.uint8,
        np.float32,
    )
    assert np.all((arrays["log_probs"] != 0) == (arrays["loss_mask"] == 1))


def test_a_turn_without_its_stop_token_ends_the_record(tokenizer: ChatTokenizer) -> None:
    for reason in (FinishReason.LENGTH, FinishReason.ABORT):
        record = SessionRecord(tokenizer, [said("user", "a")])
        assert record.append_generation(generation(tokenizer.encode("abc"), reason=reason)) == "abc"
        assert record.closed
        with pytest.raises(ProtocolError, match="stop token"):
            record.append_messages([said("tool", "x")])
        with pytest.raises(ProtocolError, match="closed"):
            record.append_generation(generation([tokenizer.stop_ids[0]]))


def test_an_abort_without_a_token_leaves_the_record_as_it_was(characters: ChatTokenizer) -> None:
    record = SessionRecord(characters, [said("user", "a")])
    record.append_generation(generation([*characters.encode("ls"), 4], rows=3 + 1 + 2))
    tokens = record.input_ids().tolist()
    record.append_messages([said("tool", "x")])
    record.append_generation(generation([], reason=FinishReason.ABORT, rows=0))
    record.trim()
    assert record.input_ids().tolist() == tokens and record.n_rows == len(tokens) - 1


def test_special_tokens_in_outputs_are_text_of_no_consequence(tokenizer: ChatTokenizer) -> None:
    stop = tokenizer.decode([tokenizer.stop_ids[0]])
    record = SessionRecord(tokenizer, [said("user", "a")])
    record.append_scripted(f"l{stop}s")
    record.append_messages([said("tool", f"x{stop}y")])
    tokens, mask = record.input_ids(), result(record)["loss_mask"]
    assert (tokens[mask == 1] == tokenizer.stop_ids[0]).sum() == 1
    assert record.messages[-1].content == "xy" and record.messages[-2].content == "ls"


def test_scripted_turns_look_as_if_sampled(tokenizer: ChatTokenizer) -> None:
    talk = [said("user", "a"), said("assistant", "ls"), said("tool", "b"), said("assistant", "ans b")]
    scripted, sampled = SessionRecord(tokenizer, talk[:1]), SessionRecord(tokenizer, talk[:1])
    assert scripted.append_scripted("ls") == "ls"
    sampled.append_generation(generation([*tokenizer.encode("ls"), tokenizer.stop_ids[0]]))
    for record in (scripted, sampled):
        record.append_messages(talk[2:3])
        record.append_scripted("ans b")
    assert scripted.input_ids().tolist() == sampled.input_ids().tolist()
    assert result(scripted)["loss_mask"].tolist() == result(sampled)["loss_mask"].tolist()
    assert scripted.versions == () and scripted.routed_experts() is None


def test_order_is_enforced(characters: ChatTokenizer) -> None:
    record = SessionRecord(characters, [said("user", "a")])
    with pytest.raises(ProtocolError):
        record.append_messages([said("tool", "x")])
    record.append_scripted("ls")
    with pytest.raises(ProtocolError, match="expected messages next"):
        record.append_scripted("ls")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"versions": ()}, "end at token 0 of 3"),
        ({"versions": (VersionSpan(version=V1, start=1, end=3),)}, "in order"),
        ({"versions": (VersionSpan(version=V1, start=0, end=4),)}, "end at token 4 of 3"),
        ({"rows": 2}, "expected 6"),
    ],
)
def test_generations_that_do_not_fit_are_refused(characters: ChatTokenizer, bad: dict, message: str) -> None:
    record = SessionRecord(characters, [said("user", "a")])
    with pytest.raises(ProtocolError, match=message):
        record.append_generation(generation([*characters.encode("ls"), 4], **bad))


def test_a_stop_token_that_the_template_does_not_write_is_explained(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("other")
    tokenizer = chatml_tokenizer(folder, CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.encode("<|endoftext|>")}))
    tokenizer = ChatTokenizer(folder)
    assert len(tokenizer.stop_ids) == 2
    record = SessionRecord(tokenizer, [said("user", "a")])
    record.append_generation(generation([5, tokenizer.stop_ids[1]]))
    with pytest.raises(UserError, match="end-of-turn token"):
        record.append_messages([said("user", "x")])
