"""Count what a run trained, from its journals and manifests alone: `python -m tools.audit_run RUN_DIR [--json]`.

Reads journal/, checkpoints/, the payloads that journals refer to, and resolved.toml for how many groups were asked
for. Works while the run is going on, and on a login node. Exit code: 0 sound, 1 a group is lost, trained twice or
contradictory (or, with --strict, bytes on storage are damaged), 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpoints.journal import Evaluated, EvaluationSkipped, GroupOwned, JournalCorrupt, JournalRead, read_journals
from checkpoints.lineage import Account, account, reusable_groups
from checkpoints.manifest import CheckpointFolder, list_checkpoints
from checkpoints.verify import verify_checkpoint, verify_payload

__all__ = ["Audit", "audit", "main"]


@dataclass(frozen=True)
class Payloads:
    """Payload files named by journals. `collected`: gone, and not needed any more."""

    present: int
    collected: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """Everything that is printed."""

    run_dir: str
    asked: int | None  # groups that the run file asks for; None when resolved.toml doesn't say
    account: Account
    checkpoints: tuple[CheckpointFolder, ...]
    payloads: Payloads
    evaluations: tuple[Evaluated, ...]
    skipped: tuple[EvaluationSkipped, ...]
    problems: tuple[str, ...]  # with files on storage

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable names."""
        counted = self.account
        return {
            "run_dir": self.run_dir,
            "sound": counted.sound,
            "completed": counted.completed,
            "step": counted.step,
            "unsaved_steps": counted.unsaved_steps,
            "asked": self.asked,
            "trained": len(counted.trained),
            "lost": list(counted.lost),
            "twice": list(counted.twice),
            "conflicts": list(counted.conflicts),
            "missing_steps": list(counted.missing_steps),
            "pending": len(counted.pending),
            "set_aside": dict(Counter(counted.set_aside.values())),
            "dropped": dict(Counter(counted.dropped.values())),
            "staleness": {str(k): v for k, v in sorted(Counter(counted.staleness.values()).items())},
            "lineage": [asdict(s) for s in counted.segments],
            "terms": [asdict(t) for t in counted.terms],
            "checkpoints": [
                {"folder": c.path.name, "term": c.term, "step": c.step, "usable": c.usable, "problems": c.problems}
                for c in self.checkpoints
            ],
            "payloads": {"present": self.payloads.present, "collected": self.payloads.collected},
            "evaluations": [{"step": e.step, "n": e.n, "mean": e.mean} for e in self.evaluations],
            "evaluations_skipped": [{"step": e.step, "reason": e.reason} for e in self.skipped],
            "problems": list(self.problems),
        }


def audit(run_dir: Path) -> Audit:
    """Audit a run directory. Raises JournalCorrupt, and FileNotFoundError for what isn't a run directory."""
    if not (run_dir / "journal").is_dir():
        raise FileNotFoundError(f"{run_dir} has no journal folder: expected the directory of a run that was started")
    checkpoints = list_checkpoints(run_dir / "checkpoints")
    journals = read_journals(run_dir / "journal")  # after the manifests: so it holds what they refer to
    newest = next((c for c in reversed(checkpoints) if c.usable), None)
    counted = account(journals, newest.manifest if newest is not None else None)
    payloads = _payloads(run_dir, journals, counted)
    problems = list(payloads.problems)
    for checkpoint in checkpoints:
        if checkpoint.manifest is not None:
            found = checkpoint.problems or verify_checkpoint(checkpoint.path, checkpoint.manifest)
            problems += [f"{checkpoint.path.name}: {p}" for p in found]
        elif checkpoint.problems != ("incomplete",):
            problems += checkpoint.problems
    return Audit(
        run_dir=str(run_dir),
        asked=_asked(run_dir / "resolved.toml"),
        account=counted,
        checkpoints=checkpoints,
        payloads=payloads,
        evaluations=tuple(r for j in journals.values() for r in j.records() if isinstance(r, Evaluated)),
        skipped=tuple(r for j in journals.values() for r in j.records() if isinstance(r, EvaluationSkipped)),
        problems=tuple(problems),
    )


def _payloads(run_dir: Path, journals: dict[int, JournalRead], counted: Account) -> Payloads:
    needed = {(r.group_id, r.path) for r in reusable_groups(journals, counted).values()}
    records = {r.path: r for j in journals.values() for r in j.records() if isinstance(r, GroupOwned)}
    present, collected, problems = 0, 0, []
    for record in records.values():
        if not (run_dir / record.path).exists() and (record.group_id, record.path) not in needed:
            collected += 1
            continue
        problem = verify_payload(run_dir, record)
        if problem is None:
            present += 1
        else:
            problems.append(problem)
    return Payloads(present, collected, tuple(problems))


def _asked(resolved: Path) -> int | None:
    try:
        rollout = tomllib.loads(resolved.read_text())["rollout"]
        return int(rollout["n_steps"]) * int(rollout["rollout_batch_size"])
    except (FileNotFoundError, KeyError, tomllib.TOMLDecodeError):
        return None


def _lines(result: Audit) -> list[str]:
    counted = result.account
    asked = f"/{result.asked}" if result.asked is not None else ""
    dropped = ", ".join(f"{k} {v}" for k, v in sorted(Counter(counted.dropped.values()).items())) or "none"
    aside = ", ".join(f"{k} {v}" for k, v in sorted(Counter(counted.set_aside.values()).items())) or "none"
    ages = ", ".join(f"{k}: {v}" for k, v in sorted(Counter(counted.staleness.values()).items())) or "-"
    usable = [c for c in result.checkpoints if c.usable]
    lines = [
        f"run         {result.run_dir}",
        f"state       {'completed' if counted.completed else 'not completed'}, step {counted.step} in the newest"
        f" manifest, {counted.unsaved_steps} steps done after it",
        f"groups      trained {len(counted.trained)}{asked}, lost {len(counted.lost)}, twice {len(counted.twice)},"
        f" pending {len(counted.pending)}",
        f"dropped     {dropped}",
        f"set aside   {aside}",
        f"staleness   {ages}  (steps at use: groups)",
        f"checkpoints {len(usable)} usable of {len(result.checkpoints)}",
        f"payloads    {result.payloads.present} good, {len(result.payloads.problems)} bad,"
        f" {result.payloads.collected} collected",
        "",
        f"{'term':>4} {'attempt':>7} {'continues':>10} {'steps':>6} {'on lineage':>10} {'owned':>6} {'trained':>7}"
        f" {'torn bytes':>10}",
    ]
    for t in counted.terms:
        base = f"{t.base[0]}.{t.base[1]}" if t.base[0] else "-"
        lines.append(
            f"{t.term:>4} {t.attempt:>7} {base:>10} {t.steps_done:>6} {t.steps_on_lineage:>10}"
            f" {t.groups_owned:>6} {t.groups_trained:>7} {t.torn_bytes:>10}"
        )
    wrong = {
        "lost": counted.lost,
        "trained twice": counted.twice,
        "contradictory": counted.conflicts,
        "steps without a batch": counted.missing_steps,
    }
    lines += [f"WRONG: {what}: {', '.join(map(str, ids[:20]))}" for what, ids in wrong.items() if ids]
    lines += [f"damaged: {problem}" for problem in result.problems]
    return lines


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="audit_run", description="Count what a run trained, lost and trained twice.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--strict", action="store_true", help="exit 1 for damaged files as well")
    options = parser.parse_args(argv)
    try:
        result = audit(options.run_dir)
    except FileNotFoundError as error:
        print(f"audit_run: {error}", file=sys.stderr)
        return 2
    except JournalCorrupt as error:
        print(f"audit_run: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result.as_json(), indent=1) if options.json else "\n".join(_lines(result)))
    return 0 if result.account.sound and not (options.strict and result.problems) else 1


if __name__ == "__main__":
    raise SystemExit(main())
