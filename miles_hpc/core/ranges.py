"""What each number of a run file may be: a table, checked by `validate`."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NUMBERS", "Range"]


class Range(NamedTuple):
    """What a number may be. The upper ends are far beyond any use: they keep nonsense from overflowing later."""

    lowest: float
    highest: float
    above: bool = False  # more than `lowest`, not `lowest` itself

    def complaint(self, value: float) -> str:
        """What is expected when `value` isn't in the range, "" when it is. NaN is in no range."""
        if self.lowest <= value <= self.highest and not (self.above and value == self.lowest):
            return ""
        if value > self.highest:
            return f"expected at most {self.highest:.9g}"
        if self.above:
            return f"expected more than {self.lowest:g}"
        return f"expected {self.lowest:g} or more" if self.lowest != 1 else "expected at least 1"


_COUNT = Range(1, 10**9)
_COUNT_OR_NONE = Range(0, 10**9)
_SEED = Range(0, 2**32 - 1)
_SECONDS = Range(0, 10**8, above=True)
_POSITIVE = Range(0, 10**6, above=True)
_WEIGHT = Range(0, 10**6)
_SHARE = Range(0, 1)
_BETA = Range(0, 0.999999999)

#: Every number outside `groups`, whose numbers depend on the role (`_group`).
NUMBERS: dict[str, Range] = {
    "seed": _SEED,
    "model.init_seed": _SEED,
    "job.signal_s": Range(0, 65535),  # sbatch --signal
    "job.max_allocations": _COUNT,
    "job.max_idle_allocations": _COUNT,
    "sandbox.cpu_s": _COUNT,
    "sandbox.memory_mb": Range(64, 10**7),  # bash itself takes some
    "sandbox.file_mb": Range(1, 10**7),
    "sandbox.folder_mb": Range(2, 10**7),
    "sandbox.processes": Range(4, 10**6),
    "sft.steps": _COUNT_OR_NONE,
    "sft.n_demonstrations": _COUNT,
    "sft.batch_size": _COUNT,
    "sft.lr": _POSITIVE,
    "sft.lr_warmup_steps": _COUNT_OR_NONE,
    "sft.lr_decay_from": _SHARE,
    "sft.lr_min_ratio": _SHARE,
    "sft.aux_loss_coef": _WEIGHT,
    "rollout.n_steps": _COUNT_OR_NONE,  # 0: the warm start alone, for comparison
    "rollout.rollout_batch_size": _COUNT,
    "rollout.n_samples_per_prompt": _COUNT,
    "rollout.engines_per_host": Range(1, 1024),
    "rollout.slots_per_engine": Range(1, 10**6),
    "sglang.num_gpus_per_engine": Range(1, 1024),
    "rollout.engine_step_interval_s": Range(0, 60),
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.max_turns": _COUNT,
    "rollout.max_tokens_per_turn": _COUNT,
    "rollout.max_trajectory_tokens": Range(2, 10**9),  # one token of prompt, one of answer
    "rollout.trajectory_deadline_s": _SECONDS,
    "rollout.max_admitted_batches": Range(1, 10**6),  # at least 1 to fill a batch
    "rollout.max_weight_staleness": _COUNT_OR_NONE,
    "rollout.max_group_attempts": _COUNT,
    "rollout.sandbox_timeout_s": _SECONDS,
    "rollout.sandbox_max_output_bytes": _COUNT_OR_NONE,
    "sessions.max_rollback": Range(0, 2**20),
    "sessions.max_sessions": Range(1, 10**5),  # as many as the router knows
    "sessions.max_in_flight": Range(1, 10**4),
    "sessions.max_messages": Range(1, 10**6),
    "sessions.max_body_bytes": Range(2**10, 2**30),
    "sessions.max_session_tokens": _COUNT,
    "sessions.max_turns": Range(1, 10**6),
    "sessions.ttl_s": _SECONDS,
    "sessions.request_deadline_s": _SECONDS,
    "sessions.journal_segment_bytes": Range(2**16, 2**40),
    "train.lr": _POSITIVE,
    "train.lr_warmup_steps": _COUNT_OR_NONE,
    "train.adam_beta1": _BETA,
    "train.adam_beta2": _BETA,
    "train.weight_decay": _WEIGHT,
    "train.clip_grad": _POSITIVE,
    "train.eps_clip": _WEIGHT,
    "train.eps_clip_high": _WEIGHT,
    "train.kl_loss_coef": _WEIGHT,
    "train.entropy_coef": _WEIGHT,
    "train.tis_clip": _POSITIVE,
    "train.minibatches_per_step": Range(1, 1),
    "train.max_tokens_per_microbatch": _COUNT,
    "train.row_tokens": _COUNT,
    "train.probe_sequences": Range(0, 10**6),
    "train.threads": Range(1, 4096),
    "eval.n_episodes": _COUNT_OR_NONE,
    "eval.n_samples_per_eval_prompt": Range(1, 10**6),
    "eval.interval": _COUNT_OR_NONE,
    "eval.seed": _SEED,
    "eval.temperature": _WEIGHT,  # 0 = greedy
    "eval.top_p": Range(0, 1, above=True),
    "eval.max_turns": _COUNT_OR_NONE,
    "eval.max_tokens_per_turn": _COUNT_OR_NONE,
    "eval.success_reward": _WEIGHT,
    "eval.engines_per_host": Range(0, 1023),
    "eval.slot_share": Range(0, 1, above=True),
    "eval.max_in_flight": _COUNT,
    "eval.deadline_s": _SECONDS,
    "checkpoint.interval_steps": _COUNT,
    "checkpoint.keep": _COUNT,
    "control.heartbeat_interval_s": _SECONDS,
    "control.lost_after_s": _SECONDS,
    "control.lease_s": _SECONDS,
    "control.connect_deadline_s": _SECONDS,
    "control.start_deadline_s": _SECONDS,
    "control.call_deadline_s": _SECONDS,
    "control.sync_deadline_s": _SECONDS,
    "control.step_deadline_s": _SECONDS,
    "control.max_role_restarts": _COUNT_OR_NONE,
}
