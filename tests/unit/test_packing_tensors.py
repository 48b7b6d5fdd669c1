"""Payload files to arrays and tensors: placement, checks, and that packed trajectories don't see each other."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.errors import IntegrityError
from miles_hpc.core.types import Array, MicrobatchPlan, ModelShape
from tests.conformance.training_task import (
    EXPERTS,
    LAYERS,
    MOE,
    TOP_K,
    VOCAB,
    fake_routing,
    make_items,
    pack,
    write_payload,
)
from tests.exploring import examples

torch = pytest.importorskip("torch")

from miles_hpc.trainer.batch import PayloadReader, assemble, empty, to_device  # noqa: E402
from miles_hpc.trainer.replay import check_routed_experts  # noqa: E402

SHAPE = ModelShape(
    vocab_size=VOCAB, max_position_embeddings=64, moe_layers=tuple(range(LAYERS)), n_experts=EXPERTS, top_k=TOP_K
)
CPU = torch.device("cpu")


@pytest.fixture
def items(tmp_path):
    return make_items(tmp_path)


def change_trajectory(root, item, **fields):
    """`item` with its trajectory replaced in the payload file."""
    path = root / item.payload.path
    from miles_hpc.core.types import TrajectoryGroup

    group = msgspec.msgpack.decode(path.read_bytes(), type=TrajectoryGroup)
    changed = tuple(msgspec.structs.replace(t, **fields) if t.index == item.index else t for t in group.trajectories)
    ref = write_payload(root, msgspec.structs.replace(group, trajectories=changed))
    return msgspec.structs.replace(item, payload=ref)


@given(seed=st.integers(0, 10**6), longest=st.integers(4, 30), n_groups=st.integers(1, 4))
@settings(max_examples=examples(25))
def test_every_loss_token_is_predicted_from_the_token_before_it(tmp_path_factory, seed, longest, n_groups):
    root = tmp_path_factory.mktemp("run")
    items = make_items(root, seed=seed, longest=longest, n_groups=n_groups)
    plan = pack(items)
    reader = PayloadReader(root)
    arrays = assemble(plan, reader, SHAPE, fake_routing)
    batch = to_device(arrays, CPU)
    assert arrays.n_tokens == sum(i.n_tokens for i in items)
    assert arrays.n_loss_tokens == sum(i.n_loss_tokens for i in items) == len(batch.targets)
    width = arrays.tokens.shape[1]
    expected = set()
    for item in plan.items:
        t = reader.trajectory(item)
        tokens, mask, log_probs = t.tokens.numpy(), t.loss_mask.numpy(), t.log_probs.numpy()
        routing = fake_routing(item.routed_experts)
        for i in range(item.n_tokens):
            at = (item.row, item.offset + i)
            assert arrays.tokens[at] == tokens[i] and arrays.position_ids[at] == i
            assert arrays.recorded[at] == (i < item.n_tokens - 1)
            if i < item.n_tokens - 1:
                np.testing.assert_array_equal(arrays.routed_experts[at], routing[i])
            if mask[i]:
                flat = item.row * width + item.offset + i - 1
                expected.add((flat, int(tokens[i]), float(log_probs[i]), float(np.float32(item.advantage))))
    got = zip(*(x.tolist() for x in (batch.select, batch.targets, batch.log_probs, batch.advantages)), strict=True)
    assert set(got) == expected


def test_mask_is_block_diagonal_and_causal(tmp_path, items):
    arrays = assemble(pack(items), PayloadReader(tmp_path), SHAPE)
    mask = to_device(arrays, CPU).attention_mask[:, 0].numpy()
    rows, width = arrays.tokens.shape
    for r in range(rows):
        for q in range(width):
            for k in range(width):
                same = arrays.segment_ids[r, q] == arrays.segment_ids[r, k]
                assert mask[r, q, k] == (same and k <= q)
    assert mask.any(-1).all()  # a padding token sees itself: no NaN


def test_unused_columns_are_cut_off(tmp_path, items):
    plan = pack(items[:1])
    arrays = assemble(msgspec.structs.replace(plan, rows=2), PayloadReader(tmp_path), SHAPE)
    assert arrays.tokens.shape == (2, items[0].n_tokens)
    assert arrays.routed_experts is None
    nothing = assemble(MicrobatchPlan(rows=1, row_tokens=8, items=()), PayloadReader(tmp_path), SHAPE)
    assert nothing.n_tokens == 0 and nothing.tokens.shape == empty().tokens.shape == (1, 1)


def test_packed_equals_unpacked(tmp_path, items):
    """float64, so that a leak between neighbours can't hide in rounding."""
    transformers = pytest.importorskip("transformers")
    fields = dict(MOE)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    model.set_experts_implementation("eager")
    reader = PayloadReader(tmp_path)
    plan = pack(items)
    batch = to_device(assemble(plan, reader, SHAPE), CPU)
    with torch.no_grad():
        packed = model(
            input_ids=batch.tokens,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        ).logits
        for item in plan.items:
            ids = torch.tensor(reader.trajectory(item).tokens.numpy().astype(np.int64))[None]
            alone = model(input_ids=ids, use_cache=False).logits[0]
            there = packed[item.row, item.offset : item.offset + item.n_tokens]
            torch.testing.assert_close(there, alone, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- bad input


def test_payload_bytes_are_checked(tmp_path, items):
    path = tmp_path / items[0].payload.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="CRC"):
        assemble(pack(items), PayloadReader(tmp_path), SHAPE)
    path.unlink()
    with pytest.raises(IntegrityError, match="can't be read"):
        assemble(pack(items), PayloadReader(tmp_path), SHAPE)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_tokens": 3}, "the plan says"),
        ({"n_loss_tokens": 99}, "loss tokens"),
        ({"index": 77}, "expected trajectory 77"),
        ({"group_id": 77}, "of group 77"),
        ({"row": 9}, "planned at row 9"),
        ({"offset": 31}, "planned at row"),
        ({"offset": -1}, "planned at row"),
    ],
)
def test_a_plan_that_disagrees_is_refused(tmp_path, items, change, text):
    plan = pack(items)
    bad = msgspec.structs.replace(plan.items[0], **change)
    with pytest.raises(IntegrityError, match=text):
        assemble(msgspec.structs.replace(plan, items=(bad, *plan.items[1:])), PayloadReader(tmp_path), SHAPE)


def test_overlap_is_refused(tmp_path, items):
    plan = pack(items[:2])
    moved = msgspec.structs.replace(plan.items[1], offset=1)
    with pytest.raises(IntegrityError, match="over another trajectory"):
        assemble(msgspec.structs.replace(plan, items=(plan.items[0], moved)), PayloadReader(tmp_path), SHAPE)


@pytest.mark.parametrize(
    ("fields", "n_loss_tokens", "text"),
    [
        (lambda n: {"tokens": Array.of(np.full(n, VOCAB, np.int32))}, None, "vocabulary"),
        (lambda n: {"loss_mask": Array.of(np.eye(1, n, dtype=np.uint8)[0])}, 1, "first token"),
        (lambda n: {"log_probs": Array(dtype="float32", shape=(n,), data=b"123")}, None, "buffer"),
        (lambda n: {"log_probs": Array.of(np.full(n, np.nan, np.float32))}, None, "finite"),
        (lambda n: {"log_probs": Array.of(np.zeros(n - 1, np.float32))}, None, "the plan says"),
    ],
)
def test_bad_trajectories_are_refused(tmp_path, items, fields, n_loss_tokens, text):
    bad = change_trajectory(tmp_path, items[0], **fields(items[0].n_tokens))
    if n_loss_tokens is not None:
        bad = msgspec.structs.replace(bad, n_loss_tokens=n_loss_tokens)
    with pytest.raises(IntegrityError, match=text):
        assemble(pack([bad]), PayloadReader(tmp_path), SHAPE)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (np.zeros((3, LAYERS, TOP_K), np.float32), "dtype"),
        (np.zeros((4, LAYERS, TOP_K), np.uint8), "shape"),
        (np.zeros((3, LAYERS + 1, TOP_K), np.uint8), "shape"),
        (np.full((3, LAYERS, TOP_K), EXPERTS, np.uint8), "span"),
        (np.full((3, LAYERS, TOP_K), -1, np.int32), "span"),
        (np.zeros((3, LAYERS, TOP_K), np.uint8), "twice"),
    ],
)
def test_bad_routing_is_refused(ids, text):
    with pytest.raises(IntegrityError, match=text):
        check_routed_experts(ids, n_tokens=4, shape=SHAPE, what="group 1 trajectory 2")


def test_good_routing_of_any_integer_type():
    ids = np.tile(np.array([3, 1], np.uint16), (3, LAYERS, 1))
    got = check_routed_experts(ids, n_tokens=4, shape=SHAPE, what="t")
    assert got.dtype == np.int64 and (got == ids).all()
    assert check_routed_experts(ids[:0], n_tokens=1, shape=SHAPE, what="t").shape == (0, LAYERS, TOP_K)
