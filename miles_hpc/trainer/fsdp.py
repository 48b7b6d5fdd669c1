"""FSDP2 backend: a transformers model sharded over a one-dimensional mesh (gloo on CPU, NCCL on GPUs).

    plan, payload files ─▶ arrays (batch) ─▶ agree ─▶ for each microbatch: forward (replay) ─ loss ─ backward
                                                        └ the last one reduces the gradients over ranks
                        ─▶ one all-reduce: metric sums and squared gradient norm ─▶ clip ─▶ AdamW

| what | how |
|---|---|
| token mean | each rank's loss is over the global token count; FSDP averages over ranks, so it is scaled back |
| uneven work | every rank runs as many forwards as the busiest one; missing ones are a single padding token |
| packed rows | block-diagonal causal mask and restarted positions; the output head sees loss positions only |
| failures | reading data may fail on one rank alone: all ranks agree on the outcome before the first collective |
| phases | the optimizer starts afresh where the loss changes from sft to grpo; a KL term's reference is taken there |

Not thread-safe. Every method but `close` is collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import MilesError, PeerLost, ProtocolError
from miles_hpc.core.messages import TrainStep
from miles_hpc.core.types import ModelShape
from miles_hpc.routing.replay import RouterTap, find_routers
from miles_hpc.routing.store import RoutedExpertsStore
from miles_hpc.trainer.backend import HostTensor, SaveHandle, StepResult, TrainBackend
from miles_hpc.trainer.batch import (
    DeviceBatch,
    PackedArrays,
    PayloadReader,
    RoutedExpertsReader,
    assemble,
    empty,
    to_device,
)
from miles_hpc.trainer.loss import LossSettings, grpo_loss, load_balancing_loss, sft_loss, token_scores
from miles_hpc.trainer.model import decoder_layers, load_model
from miles_hpc.trainer.state import TrainerCounters, load_counters, load_state, save_state, state_tensors

__all__ = ["FsdpBackend", "device_index"]

#: Below this size the gathered parameters stay in memory between forward and backward: fewer all-gathers.
_KEEP_GATHERED_BYTES = 1 << 30


#: Means over the batch's loss tokens; other metrics are means over those that a forward saw (trajectories without
#: advantage may have been left out of the plan).
_LOSS_PARTS = ("aux_loss", "kl_loss", "loss", "pg_loss")


def device_index(local_rank: int, visible: int) -> int:
    """The CUDA device of a node's `local_rank`-th rank that sees `visible` devices.

    Where the site binds GPUs to tasks each rank sees its own alone, as device 0, whatever its rank.
    """
    return local_rank % visible


class FsdpBackend(TrainBackend):
    """One rank. `root` is the run directory; `store` must be reachable by all ranks and is used to rendezvous.

    `read_routed_experts` replaces the run directory's routing store in tests. `timeout_s` bounds every collective.
    """

    def __init__(
        self,
        run: RunConfig,
        root: Path,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        local_rank: int = 0,
        timeout_s: float = 600.0,
        read_routed_experts: RoutedExpertsReader | None = None,
    ) -> None:
        self._run = run
        self._root = root
        self._rank = rank
        self._world = world_size
        self._payloads = PayloadReader(root)
        self._read_routed_experts = read_routed_experts or RoutedExpertsStore(root).read
        if torch.cuda.is_available():
            self._device = torch.device("cuda", device_index(local_rank, torch.cuda.device_count()))
            torch.cuda.set_device(self._device)
            backends = "cpu:gloo,cuda:nccl"
        else:
            self._device = torch.device("cpu")
            backends = "gloo"
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=limit)
        self._host_group = dist.new_group(backend="gloo", timeout=limit)
        self._save_group = dist.new_group(backend="gloo", timeout=limit)
        self._saves: list[SaveHandle] = []
        self._step = 0
        self._loss = ""
        self._reference: dict[str, torch.Tensor] = {}
        self._select: torch.Tensor | None = None
        self._build()

    # ------------------------------------------------------------------------------------------ contract

    def load(self, checkpoint: Path | None) -> int:
        if checkpoint is None:
            if self._step:
                self._step, self._loss, self._reference = 0, "", {}
                self._build()
            return self._step
        counters = load_counters(checkpoint, self.n_parameters)
        self._reshard()
        self._reference = load_state(checkpoint, self._parameters, self._optimizer, rank=self._rank)
        self._step, self._loss = counters.step, counters.loss
        return self._step

    def train_step(self, message: TrainStep) -> StepResult:
        if message.step != self._step + 1:
            raise ProtocolError(
                f"train step {message.step}: the trainer has done {self._step}, expected {self._step + 1}"
            )
        if len(message.microbatches) != self._world:
            raise ProtocolError(
                f"train step {message.step}: planned for {len(message.microbatches)} ranks, "
                f"the trainer has {self._world}"
            )
        start = time.perf_counter()
        arrays = self._read_batch(message)
        read = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)  # what a step that failed has left
        self._enter_phase(message.loss)
        sums, replayed = self._forward_backward(message, arrays)
        trained = time.perf_counter()
        metrics, counts = self._update(message, sums, replayed, sum(int(a.recorded.sum()) for a in arrays))
        self._step = message.step
        done = time.perf_counter()
        phases = {"data": read - start, "forward_backward": trained - read, "optimizer": done - trained}
        return StepResult(metrics, phases, replayed_positions=counts[0], recorded_positions=counts[1])

    @torch.no_grad()
    def score(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        n, length = tokens.shape
        result = np.empty((n, max(length - 1, 0)), np.float32)
        rows = max(1, self._run.train.max_tokens_per_microbatch // max(length, 1))
        self._model.eval()
        for first in range(0, n, rows):
            ids = torch.from_numpy(tokens[first : first + rows].astype(np.int64)).to(self._device)
            logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits  # [rows, length - 1, V]
            scores = token_scores(logits.flatten(0, 1), ids[:, 1:].flatten())
            result[first : first + rows] = scores.log_probs.view(ids.shape[0], -1).cpu().numpy()
        self._reshard()
        return result

    @torch.no_grad()
    def export_weights(self) -> Iterator[HostTensor]:
        self._reshard()
        dtype = getattr(torch, self._run.model.dtype)
        for name, parameter in self._parameters.items():
            full = parameter.full_tensor()
            if self._rank == 0:
                host = full.to("cpu", dtype, copy=True).contiguous()  # of its own: it is served while training goes on
                data = memoryview(host.reshape(-1).view(torch.uint8).numpy())
            else:
                data = memoryview(b"")
            yield HostTensor(name, self._run.model.dtype, tuple(full.shape), data)

    def save(self, folder: Path) -> SaveHandle:
        self._reshard()
        counters = TrainerCounters(
            step=self._step, loss=self._loss, world_size=self._world, n_parameters=self.n_parameters
        )
        self._wait_for_saves()  # one at a time: they share a process group
        tensors = state_tensors(self._parameters, self._optimizer, self._reference)
        handle = save_state(folder, tensors, counters, rank=self._rank, group=self._save_group)
        self._saves = [handle]
        return handle

    def close(self) -> None:
        self._wait_for_saves()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait_for_saves(self) -> None:
        for handle in self._saves:
            try:
                handle.result()
            except MilesError:
                pass  # whoever asked for the save learns of it from the handle
        self._saves = []

    # ------------------------------------------------------------------------------------------ building

    def _build(self) -> None:
        run = self._run
        model = load_model(run, self._root)
        layers = decoder_layers(model)
        routers = find_routers(layers)
        self._tap = RouterTap(routers, replay=run.rollout.routing_replay) if routers else None
        self.shape = ModelShape(
            vocab_size=model.config.vocab_size,
            max_position_embeddings=model.config.max_position_embeddings,
            moe_layers=tuple(routers),
            n_experts=self._tap.n_experts if self._tap else 0,
            top_k=self._tap.top_k if self._tap else 0,
        )
        self.n_parameters = sum(p.numel() for p in model.parameters())
        model.get_output_embeddings().register_forward_pre_hook(self._keep_selected)
        mesh = init_device_mesh(self._device.type, (self._world,), mesh_dim_names=("data",))
        policy = MixedPrecisionPolicy()
        if run.model.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        reshard = self.n_parameters * 4 > _KEEP_GATHERED_BYTES
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        model.to(self._device)
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=run.train.lr,
            betas=(run.train.adam_beta1, run.train.adam_beta2),
            weight_decay=run.train.weight_decay,
            fused=True,
        )
        # Weights must be equal on all ranks, what is drawn in training must not be.
        torch.manual_seed(run.seed * 1_000_003 + self._rank)

    def _keep_selected(self, head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """The output head computes logits [1, N, V] of the selected positions instead of all [R, L, V]."""
        if self._select is None:
            return None
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._select)[None], *args[1:])

    # ------------------------------------------------------------------------------------------ one step

    def _read_batch(self, message: TrainStep) -> list[PackedArrays]:
        """This rank's microbatches, filled up to the number of the busiest rank."""
        reader = self._read_routed_experts if message.routing_replay else None
        failure: Exception | None = None
        arrays: list[PackedArrays] = []
        try:
            for plan in message.microbatches[self._rank]:
                arrays.append(assemble(plan, self._payloads, self.shape, reader))
        except Exception as error:
            failure = error
        self._payloads.clear()
        self._agree(failure, f"reading the batch of step {message.step}")
        busiest = max(len(plans) for plans in message.microbatches)
        return arrays + [empty() for _ in range(busiest - len(arrays))]

    def _forward_backward(self, message: TrainStep, arrays: list[PackedArrays]) -> tuple[dict[str, torch.Tensor], int]:
        """Gradients of the step's loss, reduced over ranks, in the parameters; returns metric sums of this rank."""
        settings = _loss_settings(self._run)
        rl = message.loss == "grpo"
        temperature = self._run.rollout.temperature if rl else 1.0
        batches = [to_device(a, self._device) for a in arrays]
        references = self._reference_scores(batches, temperature) if rl and self._reference else None
        aux_coef = 0.0 if rl or self._tap is None else self._run.sft.aux_loss_coef
        all_tokens = sum(i.n_tokens for plans in message.microbatches for plan in plans for i in plan.items)
        total = max(1, message.total_loss_tokens)
        sums: dict[str, torch.Tensor] = {}
        replayed = 0
        self._model.train()
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            self._model.set_is_last_backward(last)
            self._model.set_requires_gradient_sync(last)
            replay = nullcontext(int)
            if self._tap is not None and batch.routed_experts is not None:
                replay = self._tap.replay(batch.routed_experts, batch.recorded)
            logits_of = self._tap.collect_logits() if self._tap is not None and aux_coef else nullcontext({})
            with replay as n_replayed, logits_of as router_logits:
                logits = self._logits(batch)
                scores = token_scores(
                    logits, batch.targets, temperature=temperature, entropy_gradient=rl and settings.entropy_coef != 0
                )
                if rl:
                    loss, parts = grpo_loss(
                        scores,
                        batch.log_probs,
                        batch.advantages,
                        settings,
                        total_loss_tokens=total,
                        reference_log_probs=None if references is None else references[number],
                    )
                else:
                    loss, parts = sft_loss(scores, total_loss_tokens=total)
                if aux_coef:
                    aux = self._aux_loss(router_logits, batch.real, all_tokens)
                    loss = loss + aux_coef * aux
                    parts["aux_loss"] = aux.detach() * total
                (loss * self._world).backward()
                replayed += n_replayed()
            for name, value in parts.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=self._device)) + value.double()
        return sums, replayed

    def _logits(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits [N, V] at the positions that predict loss tokens."""
        self._select = batch.select
        try:
            output = self._model(
                input_ids=batch.tokens,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                use_cache=False,
            )
        finally:
            self._select = None
        return output.logits[0]

    def _aux_loss(self, router_logits: dict[int, torch.Tensor], real: torch.Tensor, all_tokens: int) -> torch.Tensor:
        """This rank's part of the load-balancing loss over all ranks' tokens of this microbatch, by its share."""
        kept = torch.stack([router_logits[slot][real] for slot in sorted(router_logits)]).float()  # [layers, n, E]
        probabilities = kept.softmax(-1)
        chosen = probabilities.detach().topk(self.shape.top_k, dim=-1).indices
        totals = torch.zeros(self.shape.n_experts + 1, dtype=torch.float64)
        totals[:-1] = torch.bincount(chosen.flatten(), minlength=self.shape.n_experts).cpu()
        totals[-1] = kept.shape[0] * kept.shape[1]
        dist.all_reduce(totals, group=self._host_group)
        rows = totals[-1].item()
        share = rows / len(router_logits) / max(1, all_tokens)
        counts = totals[:-1].to(kept)
        return share * load_balancing_loss(counts, probabilities.sum((0, 1)), max(rows, 1.0))

    def _update(
        self, message: TrainStep, sums: dict[str, torch.Tensor], replayed: int, recorded_tokens: int
    ) -> tuple[dict[str, float], tuple[int, int]]:
        """All-reduce what is to be known globally, clip, step. Returns metrics and (replayed, recorded) positions."""
        gradients = [p.grad.to_local() for p in self._parameters.values() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        recorded = recorded_tokens * len(self.shape.moe_layers)
        names = sorted(sums)
        local = torch.stack([norms.square().sum(), *(sums[n] for n in names)]).cpu()
        total = torch.cat([local, torch.tensor([replayed, recorded], dtype=torch.float64)])
        dist.all_reduce(total, group=self._host_group)
        values = total.tolist()
        norm = values[0] ** 0.5
        computed = sum(i.n_loss_tokens for plans in message.microbatches for plan in plans for i in plan.items)
        metrics = {
            f"train/{name}": value / max(1, message.total_loss_tokens if name in _LOSS_PARTS else computed)
            for name, value in zip(names, values[1:-2], strict=True)
        }
        metrics["train/grad_norm"] = norm
        metrics["train/lr-pg_0"] = message.lr
        if not np.isfinite(values).all():
            raise MilesError(
                f"train step {message.step}: not finite: gradient norm {norm}, {metrics}; the step was not taken"
            )
        limit = self._run.train.clip_grad
        if limit > 0 and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = message.lr
        self._optimizer.step()
        return metrics, (int(values[-2]), int(values[-1]))

    # ------------------------------------------------------------------------------------------ phases, reference

    def _enter_phase(self, loss: str) -> None:
        """Moments of another loss don't fit; the reference of a KL term is the weights before the first RL step."""
        if loss == self._loss:
            return
        if self._loss:
            self._optimizer.state.clear()
        if loss == "grpo" and self._run.train.use_kl_loss and not self._reference:
            self._reference = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._loss = loss

    @torch.no_grad()
    def _reference_scores(self, batches: list[DeviceBatch], temperature: float) -> list[torch.Tensor]:
        """Log-probs [N] of each batch under the reference, which takes its own routing."""
        self._exchange_reference()
        try:
            return [token_scores(self._logits(b), b.targets, temperature=temperature).log_probs for b in batches]
        finally:
            self._exchange_reference()

    def _exchange_reference(self) -> None:
        """Swap weights and reference in place, shard by shard."""
        self._reshard()
        for name, parameter in self._parameters.items():
            mine, other = parameter.detach().to_local(), self._reference[name].to_local()
            kept = mine.clone()
            mine.copy_(other)
            other.copy_(kept)

    def _reshard(self) -> None:
        """Let go of gathered parameters everywhere, so that the next forward gathers the shards as they are then."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # not recursive

    def _agree(self, failure: Exception | None, what: str) -> None:
        """Raise on every rank when one failed, before anybody waits for it in a collective."""
        flag = torch.tensor([0 if failure is None else 1])
        dist.all_reduce(flag, group=self._host_group)
        if failure is not None:
            raise failure
        if int(flag) > 0:
            raise PeerLost(f"{what}: {int(flag)} other trainer ranks failed")


def _loss_settings(run: RunConfig) -> LossSettings:
    train = run.train
    return LossSettings(
        eps_clip=train.eps_clip,
        eps_clip_high=train.eps_clip_high,
        kl_loss_coef=train.kl_loss_coef if train.use_kl_loss else 0.0,
        entropy_coef=train.entropy_coef,
        use_tis=train.use_tis,
        tis_clip=train.tis_clip,
    )
