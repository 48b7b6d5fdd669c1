"""What every training backend promises, checked on real worlds of one and of two ranks.

Each world runs all scenarios once in processes of its own; the tests look at what they returned.
"""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from checkpoints.verify import crc32_of_file
from miles_hpc.core.config import SftConfig
from miles_hpc.core.errors import MilesError
from miles_hpc.core.registry import resolve
from miles_hpc.core.types import MicrobatchPlan
from tests.conformance.training_task import (
    LAYERS,
    MOE,
    fake_routing,
    make_items,
    pack,
    run_config,
    run_world,
    train_step,
)

pytestmark = pytest.mark.slow
pytest.importorskip("torch")
pytest.importorskip("transformers")

DENSE = {
    **{k: v for k, v in MOE.items() if "expert" not in k and "moe" not in k and k != "norm_topk_prob"},
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}
PROBE = np.arange(1, 31, dtype=np.int32).reshape(3, 10)


class World:
    """One rank's view of a scenario: makes backends that share the world."""

    def __init__(self, kind: str, rank: int, size: int, store: Any, root: Path) -> None:
        self.kind, self.rank, self.size, self.root = kind, rank, size, root
        self.store = store
        self.items = pickle.loads((root / "items").read_bytes())
        self._count = 0

    def backend(self, run: Any) -> Any:
        import torch.distributed as dist

        self._count += 1
        return resolve("backend", self.kind)(
            run,
            self.root,
            store=dist.PrefixStore(f"{self._count}", self.store),
            rank=self.rank,
            world_size=self.size,
            local_rank=self.rank,
            timeout_s=60.0,
            read_routed_experts=fake_routing,
        )

    def plans(self) -> list[list[MicrobatchPlan]]:
        """The same trajectories for any world; with two ranks they have one and two microbatches."""
        items = self.items
        if self.size == 1:
            return [[pack(items)]]
        return [[pack(items[:5])], [pack(items[5:8]), pack(items[8:])]]


def weights(backend: Any) -> dict[str, np.ndarray]:
    return {t.name: np.frombuffer(t.data, np.float32).reshape(t.shape).copy() for t in _exported(backend)}


def _exported(backend: Any) -> list[Any]:
    return [t for t in backend.export_weights() if len(t.data)]


def rl_steps(w: World) -> Any:
    b = w.backend(run_config())
    before, scores = weights(b), b.score(PROBE)
    results, after = [], []
    for s in (1, 2, 3):
        results.append(b.train_step(train_step(s, w.plans())))
        after.append(weights(b))
    found = (before, scores, results, after, b.score(PROBE), (b.load(None), weights(b)))
    b.close()
    return found


def accumulation(w: World) -> Any:
    """The same batch as in rl_steps, cut otherwise; with two ranks one of them has nothing at all."""
    b = w.backend(run_config())
    microbatches = [pack(w.items[:2]), pack(w.items[2:7]), pack(w.items[7:])]
    nothing = MicrobatchPlan(rows=0, row_tokens=0, items=())
    plans = [microbatches] if w.size == 1 else [microbatches, [nothing]]
    results = [b.train_step(train_step(s, plans)) for s in (1, 2, 3)]
    found = (results, weights(b))
    b.close()
    return found


def own_routing(w: World) -> Any:
    b = w.backend(run_config())
    result = b.train_step(train_step(1, w.plans(), replay=False))
    b.close()
    return result


def sft_then_rl(w: World) -> Any:
    run = msgspec.structs.replace(run_config(use_kl_loss=True, kl_loss_coef=0.1), sft=SftConfig(aux_loss_coef=0.05))
    b = w.backend(run)
    results = [b.train_step(train_step(s, w.plans(), loss="sft", replay=False)) for s in (1, 2)]
    results += [b.train_step(train_step(s, w.plans())) for s in (3, 4)]
    found = (results, weights(b))
    b.close()
    return found


def reference_of_no_weight(w: World) -> Any:
    """A KL term with coefficient 0 must leave training as it is in rl_steps."""
    b = w.backend(run_config(use_kl_loss=True, kl_loss_coef=0.0))
    results = [b.train_step(train_step(s, w.plans())) for s in (1, 2, 3)]
    found = (results, weights(b))
    b.close()
    return found


def reference_with_own_routing(w: World) -> Any:
    b = w.backend(run_config(use_kl_loss=True, kl_loss_coef=0.1))
    results = [b.train_step(train_step(s, w.plans(), replay=False)) for s in (1, 2)]
    b.close()
    return results


def dense(w: World) -> Any:
    b = w.backend(run_config(model=DENSE, use_tis=True, entropy_coef=0.01))
    results = [b.train_step(train_step(s, w.plans())) for s in (1, 2)]
    found = (b.shape, results, weights(b))
    b.close()
    return found


def bfloat16(w: World) -> Any:
    b = w.backend(run_config(dtype="bfloat16"))
    results = [b.train_step(train_step(s, w.plans())) for s in (1, 2)]
    found = (results, [(t.name, t.dtype, t.shape, len(t.data)) for t in b.export_weights()], b.score(PROBE))
    b.close()
    return found


def exported_memory(w: World) -> Any:
    """Exported bytes belong to the receiver: the next step doesn't change them."""
    b = w.backend(run_config())
    exported = _exported(b)
    before = [bytes(t.data) for t in exported]
    b.train_step(train_step(1, w.plans()))
    found = (before == [bytes(t.data) for t in exported], before == [bytes(t.data) for t in _exported(b)])
    b.close()
    return found


def refusals(w: World) -> Any:
    """Errors come on every rank, nothing hangs, and the state is as before."""
    b = w.backend(run_config())
    before = weights(b)
    caught = []

    def attempt(message: Any) -> None:
        try:
            b.train_step(message)
        except Exception as error:
            caught.append((type(error).__name__, str(error)))
        else:
            caught.append(("nothing", ""))

    attempt(train_step(2, w.plans()))
    attempt(train_step(1, [*w.plans(), []]))
    plans = w.plans()
    wrong = msgspec.structs.replace(plans[-1][-1].items[-1], index=55)  # on the last rank only
    plans[-1][-1] = msgspec.structs.replace(plans[-1][-1], items=(*plans[-1][-1].items[:-1], wrong))
    attempt(train_step(1, plans))
    plans = w.plans()
    infinite = tuple(msgspec.structs.replace(i, advantage=float("inf")) for i in plans[0][0].items)
    plans[0][0] = msgspec.structs.replace(plans[0][0], items=infinite)
    attempt(train_step(1, plans))
    after = weights(b)
    same = all(np.array_equal(before[n], after[n]) for n in before)
    result = b.train_step(train_step(1, w.plans()))
    b.close()
    return caught, same, result


def save_and_load(w: World) -> Any:
    run = run_config(use_kl_loss=True, kl_loss_coef=0.1)
    folder = w.root / f"checkpoint_{w.size}"
    folder.mkdir(exist_ok=True)
    b = w.backend(run)
    for s in (1, 2):
        b.train_step(train_step(s, w.plans()))
    handle = b.save(folder)
    third = b.train_step(train_step(3, w.plans()))  # while the save runs
    files = handle.result()
    for name, crc32 in handle.crc32().items():
        assert crc32 == crc32_of_file(folder / name) and name in files
    finished = handle.done()
    final = weights(b)
    b.close()
    again = w.backend(run)
    step = again.load(folder)
    repeated = again.train_step(train_step(3, w.plans()))
    found = (files, finished, third, final, step, repeated, weights(again))
    again.close()
    return found


def save_that_fails(w: World) -> Any:
    """A place that can't be written (below a file) is told by the handle; training and later saves go on."""
    b = w.backend(run_config())
    handle = b.save(w.root / "items" / "below")
    result = b.train_step(train_step(1, w.plans()))
    try:
        handle.result()
        error = ""
    except MilesError as failed:
        error = str(failed)
    folder = w.root / f"second_{w.size}"
    folder.mkdir(exist_ok=True)
    files = b.save(folder).result()
    b.close()
    return handle.done(), error, result, files


def load_of_the_other_world(w: World) -> Any:
    b = w.backend(run_config(use_kl_loss=True, kl_loss_coef=0.1))
    step = b.load(w.root / "checkpoint_2")
    result = b.train_step(train_step(3, w.plans()))
    found = (step, result, weights(b))
    b.close()
    return found


def bad_checkpoints(w: World) -> Any:
    caught = []
    whole = w.root / f"checkpoint_{w.size}"
    torn, blank = w.root / f"torn_{w.size}", w.root / f"blank_{w.size}"
    if w.rank == 0:
        shutil.copytree(whole, torn)
        shutil.copytree(whole, blank)
        (torn / "__0_0.distcp").unlink()
        (blank / ".metadata").write_bytes(b"")
    for model, folders in ((MOE, (w.root / "nowhere", torn, blank)), (DENSE, (whole,))):
        b = w.backend(run_config(model=model))
        for folder in folders:
            try:
                b.load(folder)
            except Exception as error:
                caught.append((type(error).__name__, str(error)))
            else:
                caught.append(("nothing", ""))
        b.close()
    return caught


SCENARIOS = (
    rl_steps,
    accumulation,
    own_routing,
    sft_then_rl,
    reference_of_no_weight,
    reference_with_own_routing,
    dense,
    bfloat16,
    exported_memory,
    refusals,
    save_and_load,
    save_that_fails,
    load_of_the_other_world,
    bad_checkpoints,
)


def all_scenarios(rank: int, size: int, store: Any, folder: Path) -> dict[str, Any]:
    world = World(folder.name.split("_")[0], rank, size, store, folder.parent)
    return {s.__name__: s(world) for s in SCENARIOS}


@dataclass
class Worlds:
    root: Path
    items: list[Any]
    found: dict[int, dict[str, list[Any]]]

    def of(self, size: int, scenario: Any, rank: int = 0) -> Any:
        return self.found[size][scenario.__name__][rank]


@pytest.fixture(scope="module", params=["fsdp"])
def worlds(request, tmp_path_factory):
    """Both sizes, the larger first: the smaller one reads its checkpoint."""
    root = tmp_path_factory.mktemp("run")
    items = make_items(root)
    (root / "items").write_bytes(pickle.dumps(items))
    found = {}
    for size in (2, 1):
        ranks = run_world(size, root / f"{request.param}_{size}", all_scenarios)
        found[size] = {s.__name__: [r[s.__name__] for r in ranks] for s in SCENARIOS}
    return Worlds(root, items, found)


def same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray], atol: float) -> None:
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


def same_metrics(a: Any, b: Any, rel: float = 1e-4) -> None:
    assert a.metrics.keys() == b.metrics.keys()
    for name, value in a.metrics.items():
        assert value == pytest.approx(b.metrics[name], rel=rel, abs=1e-5), name


def test_two_ranks_step_as_one(worlds):
    before, scores, results, after, scores_after, _ = worlds.of(1, rl_steps)
    other = worlds.of(2, rl_steps)
    same_weights(before, other[0], 0.0)
    np.testing.assert_allclose(scores, other[1], atol=1e-5)
    for a, b in zip(results, other[2], strict=True):
        same_metrics(a, b)
    same_weights(after[-1], other[3][-1], 2e-4)
    np.testing.assert_allclose(scores_after, other[4], atol=1e-3)
    assert max(np.abs(after[0][n] - before[n]).max() for n in before) > 5e-3  # and a step does something


def test_loading_nothing_starts_afresh(worlds):
    for size in (1, 2):
        before, *_, (step, again) = worlds.of(size, rl_steps)
        assert step == 0
        same_weights(before, again, 0.0)


def test_results_are_equal_on_all_ranks(worlds):
    first, second = (worlds.of(2, rl_steps, rank) for rank in (0, 1))
    for a, b in zip(first[2], second[2], strict=True):
        assert a.metrics == b.metrics
        assert (a.replayed_positions, a.recorded_positions) == (b.replayed_positions, b.recorded_positions)
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(first[4], second[4])
    assert second[0] == {}  # only rank 0 gets weights


def test_cutting_a_batch_otherwise_changes_nothing(worlds):
    _, _, results, after, _, _ = worlds.of(1, rl_steps)
    for size in (1, 2):
        cut_results, cut_weights = worlds.of(size, accumulation)
        for a, b in zip(results, cut_results, strict=True):
            same_metrics(a, b)
        same_weights(after[-1], cut_weights, 2e-4)


def test_every_recorded_position_is_replayed(worlds):
    expected = sum(i.n_tokens - 1 for i in worlds.items) * LAYERS
    for size in (1, 2):
        for result in worlds.of(size, rl_steps)[2]:
            assert result.replayed_positions == result.recorded_positions == expected
        free, forced = worlds.of(size, own_routing), worlds.of(size, rl_steps)[2][0]
        assert (free.replayed_positions, free.recorded_positions) == (0, 0)
        assert forced.metrics["train/loss"] != pytest.approx(free.metrics["train/loss"], rel=1e-3)


def test_against_plain_torch(worlds):
    """The first step on a bare transformers model with torch's AdamW, one trajectory at a time."""
    import torch

    from miles_hpc.routing.replay import RouterTap, find_routers
    from miles_hpc.trainer.batch import PayloadReader
    from miles_hpc.trainer.model import load_model

    run = run_config()
    torch.set_num_threads(1)
    model = load_model(run, worlds.root)
    tap = RouterTap(find_routers(model.model.layers))
    before, scores, results, after, _, _ = worlds.of(2, rl_steps)
    same_weights({n: p.detach().numpy() for n, p in model.named_parameters()}, before, 0.0)
    probe = torch.tensor(PROBE.astype(np.int64))
    with torch.no_grad():
        normal = model(input_ids=probe[:, :-1], use_cache=False).logits.log_softmax(-1)
    np.testing.assert_allclose(scores, normal.gather(-1, probe[:, 1:, None])[..., 0].numpy(), atol=1e-5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    total, reader, loss = sum(i.n_loss_tokens for i in worlds.items), PayloadReader(worlds.root), 0.0
    for item in worlds.items:
        t = reader.trajectory(item)
        ids = torch.tensor(t.tokens.numpy().astype(np.int64))[None]
        routed = torch.tensor(fake_routing(item.routed_experts).astype(np.int64))
        with tap.replay(routed, torch.ones(item.n_tokens - 1, dtype=torch.bool)):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0] / run.rollout.temperature
            own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            mask = torch.tensor(t.loss_mask.numpy()[1:].astype(np.float32))
            ratio = (own - torch.tensor(t.log_probs.numpy()[1:].copy())).exp()
            gain = torch.minimum(ratio * item.advantage, ratio.clamp(0.8, 1.28) * item.advantage)
            part = -(gain * mask).sum() / total
            part.backward()
            loss += part.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert results[0].metrics["train/loss"] == pytest.approx(loss, rel=1e-4)
    assert results[0].metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    same_weights({n: p.detach().numpy() for n, p in model.named_parameters()}, after[0], 2e-4)


def test_metric_names(worlds):
    result = worlds.of(1, rl_steps)[2][0]
    assert set(result.metrics) == {
        "train/loss",
        "train/pg_loss",
        "train/pg_clipfrac",
        "train/ppo_kl",
        "train/entropy_loss",
        "train/grad_norm",
        "train/train_rollout_logprob_abs_diff",
        "train/train_rollout_kl",
        "train/lr-pg_0",
    }
    assert {"data", "forward_backward", "optimizer"} <= set(result.phases_s)


def test_sft_with_balancing_loss_then_rl_with_a_reference(worlds):
    one, _ = worlds.of(1, sft_then_rl)
    two, _ = worlds.of(2, sft_then_rl)
    # The world of two balances over pairs of microbatches, the other over the whole batch at once.
    assert one[0].metrics["train/loss"] == pytest.approx(two[0].metrics["train/loss"], rel=1e-4)
    assert one[0].metrics["train/aux_loss"] == pytest.approx(two[0].metrics["train/aux_loss"], rel=0.05)
    for results in (one, two):
        assert results[1].metrics["train/loss"] < results[0].metrics["train/loss"]
        assert "train/kl_loss" not in results[1].metrics and "train/aux_loss" not in results[2].metrics
        assert results[2].metrics["train/kl_loss"] > 0  # the reference takes its own routing, the policy the recorded


def test_the_reference_is_the_start_of_rl_and_stays_out_of_the_policy(worlds):
    _, _, plain, after, _, _ = worlds.of(1, rl_steps)
    for size in (1, 2):
        results, final = worlds.of(size, reference_of_no_weight)
        same_weights(after[-1], final, 2e-4)
        for a, b in zip(plain, results, strict=True):
            assert b.metrics["train/kl_loss"] > 0
            assert a.metrics["train/loss"] == pytest.approx(b.metrics["train/loss"], rel=1e-4, abs=1e-5)
        first, second = worlds.of(size, reference_with_own_routing)
        assert first.metrics["train/kl_loss"] == pytest.approx(0.0, abs=1e-9)
        assert second.metrics["train/kl_loss"] > 1e-4


def test_dense_models(worlds):
    (shape, results, one), (_, others, two) = worlds.of(1, dense), worlds.of(2, dense)
    assert shape.moe_layers == () and shape.n_experts == 0
    assert "lm_head.weight" in one
    for a, b in zip(results, others, strict=True):
        same_metrics(a, b)
        assert "train/tis" in a.metrics and a.recorded_positions == 0
    same_weights(one, two, 2e-4)


def test_bfloat16_forward_over_float32_masters(worlds):
    for size in (1, 2):
        results, tensors, scores = worlds.of(size, bfloat16)
        for a, b in zip(results, worlds.of(size, rl_steps)[2], strict=False):
            assert a.metrics["train/entropy_loss"] == pytest.approx(b.metrics["train/entropy_loss"], rel=0.05)
        assert all(d == "bfloat16" and n == 2 * int(np.prod(s)) for _, d, s, n in tensors)
        assert scores.dtype == np.float32 and np.isfinite(scores).all()


def test_exported_bytes_are_the_receivers(worlds):
    for size in (1, 2):
        kept, unchanged = worlds.of(size, exported_memory)
        assert kept and not unchanged


def test_refusals_reach_every_rank_and_leave_the_state(worlds):
    for size in (1, 2):
        for rank in range(size):
            caught, same, result = worlds.of(size, refusals, rank)
            last = "IntegrityError" if rank == size - 1 else "PeerLost"
            assert [kind for kind, _ in caught] == ["ProtocolError", "ProtocolError", last, "MilesError"], caught
            assert "not finite" in caught[3][1]
            assert same
            same_metrics(result, worlds.of(size, rl_steps, rank)[2][0], rel=1e-6)


def test_a_checkpoint_holds_the_moment_of_the_call(worlds):
    for size in (1, 2):
        for rank in range(size):
            files, finished, third, final, step, repeated, reloaded = worlds.of(size, save_and_load, rank)
            assert finished and step == 2
            assert repeated.metrics == third.metrics
            same_weights(final, reloaded, 0.0)
            assert all(n > 0 for n in files.values())
    first, second = (set(worlds.of(2, save_and_load, rank)[0]) for rank in (0, 1))
    assert not first & second
    assert {".metadata", "trainer.json", "rng_00000.msgpack"} <= first and "rng_00001.msgpack" in second
    assert first | second == {p.name for p in (worlds.root / "checkpoint_2").iterdir()}


def test_a_failed_save_is_told_and_survived(worlds):
    for size in (1, 2):
        for rank in range(size):
            done, error, result, files = worlds.of(size, save_that_fails, rank)
            assert done and "not written" in error
            same_metrics(result, worlds.of(size, rl_steps)[2][0], rel=1e-6)
            assert files


def test_another_world_size_reads_a_checkpoint(worlds):
    step, result, loaded = worlds.of(1, load_of_the_other_world)
    _, _, third, final, _, _, _ = worlds.of(2, save_and_load)
    assert step == 2
    same_metrics(result, third)
    same_weights(loaded, final, 2e-4)


def test_bad_checkpoints_are_named(worlds):
    for size in (1, 2):
        caught = worlds.of(size, bad_checkpoints)
        assert [kind for kind, _ in caught] == ["UserError", "IntegrityError", "IntegrityError", "UserError"], caught
        assert "nowhere" in caught[0][1] and "parameters" in caught[3][1]
