"""What is asked of SGLang and what its answers must hold, without SGLang."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import FinishReason, ModelShape, SamplingParams, VersionSpan, WeightVersion
from miles_hpc.rollout.sglang.api import Layers, generate_request, parse_generation, parse_scores
from miles_hpc.rollout.sglang.parts import Parts

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)
SHAPE = ModelShape(vocab_size=50, max_position_embeddings=64, moe_layers=(1, 3), n_experts=8, top_k=2)
LAYERS = Layers(n_layers=4, shape=SHAPE)


def rows(n: int, seed: int = 0) -> np.ndarray:
    """As SGLang has them: all layers, int32. Dense layers hold anything."""
    found = np.random.default_rng(seed).integers(0, 8, (n, 4, 2)).astype("<i4")
    found[:, [0, 2]] = -7
    return found


def answer(n_input: int = 5, output: tuple[int, ...] = (7, 8, 9), **changes: Any) -> dict[str, Any]:
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": len(output)},
        "prompt_tokens": n_input,
        "completion_tokens": len(output),
        "cached_tokens": 2,
        "weight_version": "1.2",
        "weight_versions": [
            {"version": "1.1", "start": 0, "end": 1},
            {"version": "1.2", "start": 1, "end": len(output)},
        ],
        "output_token_logprobs": [[-0.5, t, None] for t in output],
        "routed_experts": base64.b64encode(rows(n_input + len(output) - 1).tobytes()).decode(),
        "e2e_latency": 0.1,
    }
    return {"output_ids": list(output), "meta_info": meta | changes}


def parse(found: dict[str, Any], **changes: Any):
    told = {
        "n_input": 5,
        "max_new_tokens": 10,
        "stop_token_ids": (9,),
        "layers": LAYERS,
        "routed_experts_start": 0,
        "spans": True,
    }
    return parse_generation(json.dumps(found).encode(), **(told | changes))


def test_an_answer_becomes_a_generation() -> None:
    found = parse(answer())
    assert found.output_ids.tolist() == [7, 8, 9] and found.output_ids.dtype == np.int32
    assert found.log_probs.tolist() == [-0.5] * 3 and found.log_probs.dtype == np.float32
    assert found.versions == (VersionSpan(version=V1, start=0, end=1), VersionSpan(version=V2, start=1, end=3))
    assert found.finish_reason is FinishReason.LENGTH and found.cached_tokens == 2
    assert found.routed_experts is not None and found.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(found.routed_experts, rows(7)[:, [1, 3]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]]}, "aren't the 3 output tokens"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None], [-0.5, 8, None]]}, "aren't the 3 output tokens"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 8, None], [-0.5, 9, None]]}, "log-prob of token 1 is None"),
        ({"output_token_logprobs": None}, "log-probs of 0 tokens"),
        ({"weight_versions": None}, "weight_versions is missing"),
        ({"weight_versions": [{"version": "1.1", "start": 0, "end": 2}]}, "covers 2 of 3"),
        ({"weight_versions": [{"version": "1.1", "start": 1, "end": 3}]}, "has [1, 3) after token 0"),
        ({"weight_versions": [{"version": "none", "start": 0, "end": 3}]}, "nobody verified"),
        ({"routed_experts": None}, "--enable-return-routed-experts"),
        ({"routed_experts": "AAAA"}, "3 bytes, expected 224"),
        ({"routed_experts": "not base64!"}, "aren't base64"),
        ({"prompt_tokens": 6}, "prompt_tokens is 6: expected 5"),
        ({"completion_tokens": 2}, "completion_tokens is 2: expected 3"),
        ({"finish_reason": {"type": "exploded"}}, "finish reason 'exploded'"),
        ({"finish_reason": None}, "isn't a generation"),
    ],
)
def test_an_answer_that_lacks_something_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        parse(answer(**changes))
    assert words in str(caught.value)


def test_ids_that_are_no_experts_are_refused() -> None:
    bad = rows(7)
    bad[3, 1, 0] = 8
    with pytest.raises(IntegrityError, match="id 8, expected 0 to 7"):
        parse(answer(routed_experts=base64.b64encode(bad.tobytes()).decode()))


def test_a_stop_is_at_a_stop_token() -> None:
    assert parse(answer(finish_reason={"type": "stop", "matched": 9})).finish_reason is FinishReason.STOP
    with pytest.raises(IntegrityError, match="stopped at token 8"):
        parse(answer(output=(7, 9, 8), finish_reason={"type": "stop", "matched": 8}))


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(IntegrityError, match="3 output tokens"):
        parse(answer(), max_new_tokens=2)


def test_an_aborted_one_that_never_ran_is_empty() -> None:
    found = parse(
        {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}}
    )
    assert found.finish_reason is FinishReason.ABORT and len(found.output_ids) == 0 and found.versions == ()
    assert found.routed_experts is not None and found.routed_experts.shape == (0, 2, 2)


def test_rows_start_where_asked_and_wide_ids_take_two_bytes() -> None:
    text = base64.b64encode(rows(3).tobytes()).decode()
    found = parse(answer(routed_experts=text), routed_experts_start=4)
    assert found.routed_experts is not None and found.routed_experts.shape == (3, 2, 2)
    wide = Layers(4, ModelShape(vocab_size=50, max_position_embeddings=64, moe_layers=(1, 3), n_experts=300, top_k=2))
    assert wide.decode(text, 3).dtype == np.uint16


def test_a_server_without_spans_tells_one_version() -> None:
    found = parse(answer(weight_versions=None), spans=False)
    assert found.versions == (VersionSpan(version=V2, start=0, end=3),)
    for wrong in ("none", None):
        with pytest.raises(IntegrityError, match="nobody verified"):
            parse(answer(weight_versions=None, weight_version=wrong), spans=False)


def test_a_retraction_makes_rows_from_before_an_update_those_of_the_newer_weights() -> None:
    one = [{"version": "1.2", "start": 0, "end": 3}]
    assert len(parse(answer(num_retractions=1, weight_versions=one)).output_ids) == 3
    with pytest.raises(IntegrityError, match="retracted after an update"):
        parse(answer(num_retractions=1))
    assert len(parse(answer(num_retractions=1), layers=None).output_ids) == 3


def test_what_was_aborted_while_retracted_has_no_rows_and_so_no_tokens() -> None:
    found = parse(answer(finish_reason={"type": "abort"}, routed_experts=None, num_retractions=1))
    assert found.finish_reason is FinishReason.ABORT and len(found.output_ids) == 0 == len(found.log_probs)


def test_a_request_asks_for_all_that_is_checked() -> None:
    ids = np.asarray([1, 2], np.int32)
    sampling = SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.9, stop_token_ids=(3,), seed=4)
    body = generate_request("r", ids, sampling, max_new_tokens=7, routed_experts_start=1, namespace="1.1")
    assert body["input_ids"] == [1, 2] and body["rid"] == "r" and body["return_logprob"] is True
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 1
    assert body["sampling_params"]["max_new_tokens"] == 7 and body["sampling_params"]["stop_token_ids"] == [3]
    assert body["sampling_params"]["sampling_seed"] == 4 and body["sampling_params"]["ignore_eos"] is False
    free = generate_request(
        "r", ids, SamplingParams(max_new_tokens=9), max_new_tokens=9, routed_experts_start=None, namespace=""
    )
    assert free["sampling_params"]["ignore_eos"] is True and "return_routed_experts" not in free


def test_scores_are_of_the_tokens_that_follow() -> None:
    tokens = np.asarray([4, 5, 6], np.int32)
    entries = [[None, 4, None], [-1.0, 5, None], [-2.0, 6, None]]
    meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": entries}
    assert parse_scores(json.dumps({"meta_info": meta}).encode(), tokens, 50).tolist() == [-1.0, -2.0]
    assert parse_scores(json.dumps({"meta_info": meta}).encode(), tokens, 7).tolist() == [-1.0, -2.0]
    entries[2][1] = 0  # as SGLang tells the vocabulary's last
    assert parse_scores(json.dumps({"meta_info": meta}).encode(), tokens, 7).tolist() == [-1.0, -2.0]
    with pytest.raises(IntegrityError):
        parse_scores(json.dumps({"meta_info": meta}).encode(), tokens, 50)
    assert (
        parse_scores(json.dumps({"meta_info": meta | {"finish_reason": {"type": "abort"}}}).encode(), tokens, 7) is None
    )
    meta["input_token_logprobs"] = entries[:2]
    with pytest.raises(IntegrityError, match="2 scored tokens: expected 3"):
        parse_scores(json.dumps({"meta_info": meta}).encode(), tokens, 50)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=6))
def test_parts_make_one_generation(cuts: list[tuple[int, int]]) -> None:
    """However often updates end a request: tokens, rows and versions are those of one that nothing ended."""
    n_input, total = 4, sum(n for n, _ in cuts)
    whole, ids = rows(n_input + total - 1), list(range(total))
    parts, at = Parts(), 0
    for number, (n, step) in enumerate(cuts):
        start = parts.n_rows
        found = {
            "output_ids": ids[at : at + n],
            "meta_info": {
                "finish_reason": {"type": "length" if number == len(cuts) - 1 else "abort"},
                "output_token_logprobs": [[-float(i), i, None] for i in ids[at : at + n]],
                "weight_versions": [{"version": f"1.{step}", "start": 0, "end": n}],
                "routed_experts": base64.b64encode(whole[start : n_input + at + n - 1].tobytes()).decode(),
                "cached_tokens": number,
            },
        }
        parts.add(parse(found, n_input=n_input + at, routed_experts_start=start, max_new_tokens=n))
        at += n
    made = parts.whole(FinishReason.LENGTH, no_rows=LAYERS.decode("", 0))
    assert made.output_ids.tolist() == ids and made.log_probs.tolist() == [-float(i) for i in ids]
    np.testing.assert_array_equal(made.routed_experts, whole[:, [1, 3]])
    versions = [span.version.step for span in made.versions for _ in range(span.start, span.end)]
    assert versions == [step for n, step in cuts for _ in range(n)]
    assert all(a.version != b.version for a, b in zip(made.versions, made.versions[1:], strict=False))
    assert made.cached_tokens == 0


def test_no_parts_are_an_empty_generation() -> None:
    made = Parts().whole(FinishReason.ABORT, no_rows=LAYERS.decode("", 0))
    assert made.output_ids.dtype == np.int32 and len(made.output_ids) == len(made.log_probs) == 0
    assert made.routed_experts is not None and made.routed_experts.shape == (0, 2, 2) and made.versions == ()
