"""All checks by name: the project's own and those that users registered."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from miles_hpc.cluster.preflight import (
    checks_fabric,
    checks_gpu,
    checks_net,
    checks_node,
    checks_room,
    checks_slurm,
    checks_storage,
)
from miles_hpc.cluster.preflight.contract import Check, Comparison
from miles_hpc.core import registry
from miles_hpc.core.errors import UserError

__all__ = ["every_check", "select"]

_OWN: tuple[Check | Comparison, ...] = (
    *checks_slurm.CHECKS,
    *checks_net.CHECKS,
    *checks_net.COMPARISONS,
    *checks_fabric.CHECKS,
    *checks_gpu.CHECKS,
    *checks_gpu.COMPARISONS,
    *checks_node.CHECKS,
    *checks_node.COMPARISONS,
    *checks_storage.CHECKS,
    *checks_room.CHECKS,
    *checks_storage.COMPARISONS,
)


def every_check() -> dict[str, Check | Comparison]:
    """Checks by name: our own in the order of reading, then the entry points "check:<name>" of group `miles_hpc`.

    Raises UserError for an entry point that can't be loaded, isn't a check, or takes the name of another.
    """
    found = {check.name: check for check in _OWN}
    for name in registry.names("check"):
        target = registry.resolve("check", name)
        if not isinstance(target, Check | Comparison):
            raise UserError(f"entry point check:{name}: seen {type(target).__name__}, expected a Check or Comparison")
        if target.name in found or target.name != name:
            raise UserError(f"entry point check:{name}: its name is '{target.name}': expected '{name}', used once")
        found[name] = target
    return found


def select(only: Iterable[str] = ()) -> list[Check | Comparison]:
    """The checks of these names, all without any. Raises UserError for a name that isn't one."""
    known = every_check()
    names = [name.strip() for part in only for name in part.split(",") if name.strip()]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"expected some of {', '.join(known)}"
            raise UserError(f"--only {name}: no check of that name: {hint}")
    return [check for name, check in known.items() if not names or name in names]
