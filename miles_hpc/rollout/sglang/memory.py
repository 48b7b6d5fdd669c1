"""Device memory given back and taken again, for a trainer on the same devices.

    release ─▶ no request starts, those under way stop and keep their tokens ─▶ memory is free
    resume  ─▶ weights: a sync has to follow; kv_cache: requests go on, each from its tokens

The order of a colocated step: release both, train, resume weights, sync, resume kv_cache. Requests that waited
meanwhile go on under the new weights, and their deadlines went on.

| who waits | for what | until |
|---|---|---|
| release | an update under way | that has a deadline of its own |
| release, resume | the server | `deadline_s` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.rollout.engine import MEMORY_TAGS
from miles_hpc.rollout.sglang.api import NO_VERSION
from miles_hpc.rollout.sglang.state import CONTROL_S, EngineState
from miles_hpc.rollout.sglang.updating import Updating

__all__ = ["Memory"]


class Memory:
    """The device memory of one engine."""

    def __init__(self, state: EngineState, updating: Updating) -> None:
        self._state = state
        self._updating = updating

    async def release(self, tags: Collection[str], *, deadline_s: float) -> None:
        """See RolloutEngine. When it fails, nothing is counted as released, and the engine serves on."""
        state, wanted = self._state, self._check(tags)
        deadline = Deadline(deadline_s, f"engine {state.name}: releasing {', '.join(wanted)}")
        async with self._updating.lock:
            state.check_alive()
            new = [tag for tag in wanted if tag not in state.released]
            if not new:
                return
            state.may_start.clear()
            try:
                await state.client.pause("abort", deadline.remaining_s)
                if "weights" in new:  # told first: what is sampled from now on, if anything, has no label
                    state.version = None
                    state.awaits_weights = True
                    await state.client.set_version(NO_VERSION, deadline.remaining_s)
                await state.client.release_memory(new, deadline.remaining_s)
            except MilesError:
                with contextlib.suppress(MilesError):
                    await state.client.go_on(CONTROL_S)
                state.awaits_weights = "weights" in state.released
                state.open_again()
                raise
            state.released |= set(new)
            state.born.clear()  # every prefix is gone

    async def resume(self, tags: Collection[str], *, deadline_s: float) -> None:
        """See RolloutEngine."""
        state, wanted = self._state, self._check(tags)
        deadline = Deadline(deadline_s, f"engine {state.name}: resuming {', '.join(wanted)}")
        async with self._updating.lock:
            state.check_alive()
            held = [tag for tag in wanted if tag in state.released]
            if not held:
                return
            await state.client.resume_memory(held, deadline.remaining_s)
            state.released -= set(held)
            if not state.released:
                await state.client.go_on(deadline.remaining_s)
            state.open_again()

    def _check(self, tags: Collection[str]) -> list[str]:
        if not self._state.options.memory_saver:
            raise UserError(
                f"engine {self._state.name}: its memory can't be released: set sglang.enable_memory_saver = true"
            )
        unknown = sorted(set(tags) - set(MEMORY_TAGS))
        if unknown or not tags:
            raise UserError(f"memory tags {unknown or list(tags)}: expected some of {', '.join(MEMORY_TAGS)}")
        return [tag for tag in MEMORY_TAGS if tag in tags]
