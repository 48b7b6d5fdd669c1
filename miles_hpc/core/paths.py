"""The run directory: the one module that knows where things lie (ARCHITECTURE.md 4)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunPaths"]


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run directory. Nothing here touches the file system."""

    root: Path

    @property
    def run_toml(self) -> Path:
        return self.root / "run.toml"

    @property
    def resolved_toml(self) -> Path:
        return self.root / "resolved.toml"

    @property
    def site_toml(self) -> Path:
        """The site file that the run was submitted with, resolved."""
        return self.root / "site.toml"

    @property
    def job_script(self) -> Path:
        """The batch script of the latest submission."""
        return self.root / "job.sbatch"

    @property
    def job(self) -> Path:
        """job.json: the Slurm job of the latest submission and those before it."""
        return self.root / "job.json"

    @property
    def identity(self) -> Path:
        """Written once by submit: which run this directory belongs to."""
        return self.root / "identity.json"

    @property
    def secret(self) -> Path:
        return self.root / "secret.key"

    @property
    def model(self) -> Path:
        """config.json, tokenizer.json and chat template as every role reads them."""
        return self.root / "model"

    @property
    def terms(self) -> Path:
        return self.root / "terms"

    def term(self, term: int) -> Path:
        return self.terms / f"{term:06d}"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def output(self, job_id: int) -> Path:
        """The batch script's output, of all starts of a job; named in its directives as slurm-%A.out."""
        return self.attempts / f"slurm-{job_id}.out"

    def attempt(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:04d}"

    def rendezvous(self, term: int) -> Path:
        """Addresses of this term's listeners, published by atomic rename."""
        return self.term(term) / "rendezvous"

    def logs(self, attempt: int) -> Path:
        return self.attempt(attempt) / "logs"

    def joined(self, attempt: int) -> Path:
        """Numbered starts of processes that joined from outside the attempt's job, by name."""
        return self.attempt(attempt) / "joined"

    def outcome(self, attempt: int) -> Path:
        """How an attempt ended; written last by its supervisor."""
        return self.attempt(attempt) / "outcome.json"

    def attempt_start(self, attempt: int) -> Path:
        """What an attempt found when it started."""
        return self.attempt(attempt) / "start.json"

    @property
    def submitting(self) -> Path:
        """There while a process submits this run."""
        return self.root / "submitting"

    @property
    def cancelled(self) -> Path:
        """There while the run's owner wants nothing more to start."""
        return self.root / "cancelled"

    @property
    def bad_nodes(self) -> Path:
        """Nodes that later allocations leave out, with reasons; a user may edit it."""
        return self.root / "bad_nodes.json"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    def spool(self, term: int, host: str) -> Path:
        """Payload files of one host under one term."""
        return self.journal / "spool" / f"{term:06d}" / host

    @property
    def sessions(self) -> Path:
        return self.root / "sessions"

    def session_journal(self, server: str) -> Path:
        """Segments of one session server, which outlive it; mode 0700."""
        return self.sessions / server

    @property
    def routing(self) -> Path:
        return self.root / "routing"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, term: int, step: int) -> Path:
        """A checkpoint folder; the term keeps two lineages from writing into one folder."""
        return self.checkpoints / f"step_{step:06d}.t{term:06d}"

    @property
    def side_jobs(self) -> Path:
        """Jobs beside the run (checks, exports), a numbered folder each; mode 0700."""
        return self.root / "side_jobs"

    @property
    def exports(self) -> Path:
        """Checkpoints as Hugging Face folders, named like the checkpoint."""
        return self.root / "exports"

    @property
    def archive(self) -> Path:
        return self.root / "archive"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def report_png(self) -> Path:
        return self.root / "report.png"

    def relative(self, path: Path) -> str:
        """`path` as messages and manifests carry it."""
        return path.relative_to(self.root).as_posix()
