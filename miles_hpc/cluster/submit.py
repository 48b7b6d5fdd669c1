"""From a valid run to a submitted job: look first, then write the run directory, then hand the script to Slurm.

    check_owner  whose directory is it?         reads only
    check_job    would Slurm take the job?      reads only (preflight)
    prepare      identity, secret, configs, job text, model folder
    submit       sbatch, job.json

Nothing is written before both checks have passed. A run that is submitted again continues in its directory.
"""

from __future__ import annotations

import json
import os
import secrets
import tomllib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import msgspec

from checkpoints.publish import publish_bytes
from miles_hpc.cluster.chain import bad_nodes, is_cancelled, set_cancelled
from miles_hpc.cluster.preflight import Scheduler
from miles_hpc.cluster.slurm import ComponentState
from miles_hpc.cluster.submission_lock import sole_submission
from miles_hpc.core.config import RunConfig, SiteConfig
from miles_hpc.core.errors import MilesError, UserError
from miles_hpc.core.load import resolved_toml
from miles_hpc.core.paths import RunPaths

__all__ = [
    "SubmittingScheduler",
    "adopt_job",
    "check_idle",
    "check_owner",
    "config_digest",
    "drop_follow_up",
    "job_before",
    "prepare",
    "read_first_attempt",
    "read_follow_up",
    "read_job",
    "read_jobs",
    "read_submitted",
    "submit_follow_up",
    "submit_prepared",
]

#: Keys that may change from one submission of a run to the next: they don't decide what is computed.
_MAY_CHANGE = (
    "job",
    "control",
    "checkpoint",
    "eval",
    "python",
    "python_path",
    "run_dir",
    "site",
    "groups.rollout",
    "groups.sandbox",
    "rollout.n_steps",
)

_JOB_FILE_WAY_OUT = "mend it, or remove it when no job of this run is queued any more"


class SubmittingScheduler(Scheduler, Protocol):
    """The part of `Slurm` that submission needs."""

    def components(self, job_id: int) -> list[ComponentState]: ...

    def submit(self, script: str | Path, *, dependency: str = "", exclude: Sequence[str] = ()) -> int: ...

    def cancel(self, job_id: int) -> None: ...


def config_digest(run: RunConfig) -> str:
    """SHA-256 over what makes two submissions the same run, as hex."""
    fixed = {key: value for key, value in _flat(run).items() if not _may_change(key)}
    return sha256(json.dumps(fixed, sort_keys=True, default=str).encode()).hexdigest()


def check_owner(run: RunConfig, paths: RunPaths) -> bool:
    """Whether the directory already holds this run. Raises UserError when it belongs to another, or isn't ours."""
    root = paths.root
    _check_place(root)
    if root.exists() and not root.is_dir():
        raise UserError(f"run directory {root}: is a file, expected a folder or nothing")
    if not root.exists() or not any(root.iterdir()):
        return False
    if not paths.identity.is_file():
        raise UserError(f"run directory {root}: is not empty and has no identity.json: choose another with --run-dir")
    try:
        identity = json.loads(paths.identity.read_bytes())
        owner, digest = identity["run"], identity["config_digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{paths.identity}: can't be read ({error}): choose another directory with --run-dir"
        ) from error
    if owner != run.name:
        raise UserError(
            f"run directory {root}: belongs to run '{owner}', not '{run.name}': choose another with --run-dir"
        )
    if digest != config_digest(run):
        raise UserError(
            f"run directory {root}: belongs to run '{owner}' with another configuration"
            f"{_difference(run, paths)}: set it back, or choose another with --run-dir"
        )
    return True


def _check_place(root: Path) -> None:
    """Raise UserError when no folder can be made at `root`."""
    if not str(root).isprintable():
        raise UserError(f"run directory {str(root)!r}: expected printable characters: choose another with --run-dir")
    try:
        above = next(path for path in (root, *root.parents) if path.exists())
    except OSError as error:  # a name that is too long, a folder that can't be entered
        raise UserError(f"run directory {root}: {error.strerror}: choose another with --run-dir") from error
    if above != root and not above.is_dir():
        raise UserError(f"run directory {root}: {above} is a file: choose another with --run-dir")
    if above.is_dir() and not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"run directory {root}: no permission to write to {above}: choose another with --run-dir")


def check_idle(paths: RunPaths, slurm: SubmittingScheduler) -> None:
    """Raise UserError while an earlier submission of this run is still queued or running."""
    for job_id in (read_job(paths), read_follow_up(paths)):
        active = [c for c in slurm.components(job_id) if c.active] if job_id is not None else []
        if active:
            raise UserError(
                f"run directory {paths.root}: job {job_id} of this run is {active[0].state}: "
                "wait for it, or end it with 'miles-hpc cancel'"
            )


def prepare(
    run: RunConfig,
    site: SiteConfig,
    paths: RunPaths,
    *,
    source: str,
    job_text: str = "",
    materialise: Callable[[RunConfig, RunPaths], None] | None = None,
) -> None:
    """Write the run directory. Call after the checks; `source` is the run file's text, "" keeps the one there.

    `materialise` writes the model folder that every role reads; it is called last.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.attempts.mkdir(exist_ok=True)  # sbatch's output goes there, and Slurm makes no folders
    _claim(run, paths)
    _write_secret(paths.secret)
    texts = {paths.run_toml: source, paths.job_script: job_text}
    texts |= {paths.resolved_toml: resolved_toml(run), paths.site_toml: resolved_toml(site)}
    for path, text in texts.items():
        if text:
            publish_bytes(path, text.encode())
    if materialise is not None:
        materialise(run, paths)


def submit_prepared(paths: RunPaths, slurm: SubmittingScheduler) -> int:
    """Submit job.sbatch of a prepared directory and note the job in job.json. Returns the leader's id.

    Its first attempt is where the chain's count of allocations without progress begins; an earlier cancel is over. Both
    are on disk before sbatch is called, because the job may start before it returns; a refusal takes them back.
    Raises UserError as `check_idle`, and while another process submits this run.
    """
    with sole_submission(paths.submitting):
        check_idle(paths, slurm)
        exclude = [one.node for one in bad_nodes(paths)] if _may_exclude(paths) else []
        before, cancelled = _job_file(paths), is_cancelled(paths)
        first = 1 + max((int(p.name) for p in paths.attempts.glob("[0-9]*")), default=0)
        _write_job_file(paths, before | {"first_attempt": first, "follow_up": None})
        set_cancelled(paths, False)
        try:
            job_id = slurm.submit(paths.job_script, exclude=exclude)
        except UserError as error:
            set_cancelled(paths, cancelled)
            if before:
                _write_job_file(paths, before)
            else:
                paths.job.unlink()
            if not exclude:
                raise
            without = f"without {', '.join(exclude)}, which {paths.bad_nodes} lists: take those out that are well again"
            raise UserError(f"{error} ({without})") from error
        adopt_job(paths, job_id)
        _write_job_file(paths, _with_time(_job_file(paths), job_id))
        return job_id


def submit_follow_up(paths: RunPaths, slurm: SubmittingScheduler, after: int, *, exclude: Sequence[str] = ()) -> int:
    """Queue the job that continues the run when job `after` has ended, however it ended. Returns its leader's id.

    Raises OSError when it is queued and can't be noted: it notes itself when its turn comes.
    """
    _job_file(paths)  # what can't be read is known before anything is queued
    job_id = slurm.submit(paths.job_script, dependency=f"afterany:{after}", exclude=exclude)
    _write_job_file(paths, _with_time(_job_file(paths), job_id) | {"follow_up": job_id})
    return job_id


def adopt_job(paths: RunPaths, job_id: int) -> None:
    """Make this the run's job: the follow-up when its turn comes, and one whose submitter died before noting it."""
    note = _job_file(paths)
    if note.get("job_id") != job_id:
        _write_job_file(paths, note | {"job_id": job_id, "previous": _with_earlier(note), "follow_up": None})


def job_before(paths: RunPaths, slurm: SubmittingScheduler, job_id: int) -> int | None:
    """The job that has this run already, when `job_id` is one too many; None when it may go on.

    That happens to a job that nobody noted: its submitter was killed right after sbatch, sbatch got no answer and was
    asked again, or job.json was overwritten. It may go on when the noted ones have ended. Without Slurm's word it goes
    on too, and fences what it finds.
    """
    noted = [job for job in (read_job(paths), read_follow_up(paths)) if job is not None]
    if job_id in noted:
        return None
    for job in noted:
        try:
            if any(c.active and c.state != "COMPLETING" for c in slurm.components(job)):
                return job
        except MilesError:
            continue
    return None


def drop_follow_up(paths: RunPaths, slurm: SubmittingScheduler) -> int | None:
    """Take the follow-up out of the queue; returns its id, None when there is none."""
    note = _job_file(paths)
    follower = note.get("follow_up")
    if not isinstance(follower, int):
        return None
    slurm.cancel(follower)
    _write_job_file(paths, _job_file(paths) | {"follow_up": None})
    return follower


def read_job(paths: RunPaths) -> int | None:
    """The leader's id of the run's newest job; None when there was none."""
    job_id = _job_file(paths).get("job_id")
    return job_id if isinstance(job_id, int) else None


def read_jobs(paths: RunPaths) -> tuple[int, ...]:
    """The leaders' ids of all submissions, oldest first."""
    note = _job_file(paths)
    jobs = [*note.get("previous", []), note.get("job_id")]
    return tuple(job for job in jobs if isinstance(job, int))


def read_follow_up(paths: RunPaths) -> int | None:
    """The leader's id of the job that waits for the newest one to end; None without one."""
    job_id = _job_file(paths).get("follow_up")
    return job_id if isinstance(job_id, int) else None


def read_submitted(paths: RunPaths, job_id: int) -> float | None:
    """When this job of the run was submitted, epoch seconds; None when nobody noted that."""
    try:
        return datetime.fromisoformat(_job_file(paths)["submitted"][str(job_id)]).timestamp()
    except (UserError, KeyError, TypeError, ValueError):
        return None


def read_first_attempt(paths: RunPaths) -> int:
    """The first attempt of the newest submission by hand."""
    first = _job_file(paths).get("first_attempt")
    return first if isinstance(first, int) else 1


def _with_earlier(note: dict[str, Any]) -> list[int]:
    earlier = note.get("job_id")
    return [*note.get("previous", []), *([earlier] if isinstance(earlier, int) else [])]


def _may_exclude(paths: RunPaths) -> bool:
    site: dict[str, Any] = tomllib.loads(paths.site_toml.read_text()) if paths.site_toml.is_file() else {}
    return site.get("sbatch", {}).get("exclude_allowed") is not False


def _with_time(note: dict[str, Any], job_id: int) -> dict[str, Any]:
    """With the time of this submission; a job that nobody noted has none."""
    times = note.get("submitted")
    return note | {"submitted": {**(times if isinstance(times, dict) else {}), str(job_id): _now()}}


def _write_job_file(paths: RunPaths, note: dict[str, Any]) -> None:
    publish_bytes(paths.job, (json.dumps(note, indent=2) + "\n").encode())


def _job_file(paths: RunPaths) -> dict[str, Any]:
    try:
        note = json.loads(paths.job.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UserError(f"{paths.job}: can't be read ({error}): {_JOB_FILE_WAY_OUT}") from error
    if not isinstance(note, dict):
        raise UserError(f"{paths.job}: expected a JSON object, seen {str(note)[:40]!r}: {_JOB_FILE_WAY_OUT}")
    return note


def _claim(run: RunConfig, paths: RunPaths) -> None:
    """identity.json appears once and whole: of two submissions at the same moment one gets the directory."""
    identity = {"run": run.name, "config_digest": config_digest(run), "created": _now()}
    temporary = paths.identity.with_name(f".identity.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(identity, indent=2) + "\n")
    try:
        os.link(temporary, paths.identity)
    except FileExistsError:
        check_owner(run, paths)
    finally:
        temporary.unlink()


def _write_secret(path: Path) -> None:
    """256 bits as hex, readable by the owner only; kept when it is there."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _flat(run: RunConfig) -> dict[str, Any]:
    """Dotted keys to values; lists and empty tables are values."""
    flat: dict[str, Any] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = value

    walk(tomllib.loads(resolved_toml(run)), "")
    return flat


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in _MAY_CHANGE)


def _difference(run: RunConfig, paths: RunPaths) -> str:
    """The first key whose change isn't allowed, as text for an error."""
    try:
        old = _flat_file(paths.resolved_toml)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError):
        return ""
    new = _flat(run)
    for key in sorted(old.keys() | new.keys()):
        if not _may_change(key) and old.get(key) != new.get(key):
            return f" ({key}: {old.get(key)!r} there, {new.get(key)!r} here)"
    return ""


def _flat_file(path: Path) -> dict[str, Any]:
    return _flat(msgspec.convert(tomllib.loads(path.read_text()), RunConfig))
