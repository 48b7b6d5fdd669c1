"""Why a job waits: Slurm's reason codes as what they mean, whether waiting helps, and what to do. Pure.

Codes are squeue(1)'s "JOB REASON CODES", those of resource_limits.html, and names found in the client library of
Slurm 22.05.8. Limits are built from parts (whose limit, kind, resource, unit) and are read by their parts. An unknown
code is shown as it is: newer versions add some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

__all__ = ["CODES", "PendingReason", "explain_reason"]


@dataclass(frozen=True)
class PendingReason:
    """One reason in words. `code` is Slurm's, without the details behind it."""

    code: str  # "" = none given
    meaning: str
    helps: bool | None  # whether waiting alone may start the job; None = depends, or unknown
    advice: str = ""  # "" = nothing to do

    @property
    def sentence(self) -> str:
        """ "Priority: jobs of higher priority come first; waiting helps"."""
        outlook = {True: "waiting helps", False: "waiting doesn't help", None: ""}[self.helps]
        parts = [f"{self.code}: {self.meaning}" if self.code else self.meaning, outlook, self.advice]
        return "; ".join(part for part in parts if part)


_RESUME = "after 'miles-hpc cancel', correct it and submit again"
_OTHER_LIMIT = f"ask for less or use another job.qos, job.account or partition: {_RESUME}"
_HELD = "look at the newest attempt's log for the cause, then 'scontrol release <job id>', or cancel and resume"

#: code: (meaning, whether waiting helps, advice)
_TABLE: dict[str, tuple[str, bool | None, str]] = {
    # nothing said yet
    "None": ("the scheduler hasn't looked at it yet; a het job is looked at by the backfill loop only", True, ""),
    "WaitingForScheduling": ("the scheduler hasn't looked at it yet", True, ""),
    # queue
    "Priority": ("jobs of higher priority come first", True, ""),
    "Resources": ("it is at the head of the queue and waits for nodes to become free", True, ""),
    "SchedDefer": ("the site starts jobs at intervals only", True, ""),
    "Cleaning": ("its previous start is still being cleaned up", True, ""),
    "Prolog": ("the site's prolog runs", True, ""),
    "PrologSlurmctld": ("the site's prolog runs", True, ""),
    "BeginTime": ("its earliest start hasn't come yet; a requeued job waits like this for a while", True, ""),
    "FedJobLock": ("the federation decides which cluster starts it", True, ""),
    "JobArrayTaskLimit": ("its array runs as many tasks as it may", True, ""),
    "BurstBufferResources": ("it waits for burst buffer space", True, ""),
    "BurstBufferStageIn": ("its data are being staged in", True, ""),
    "BurstBufferOperation": ("a burst buffer operation failed or goes on", None, "ask the site"),
    "Licenses": ("it waits for a licence", True, ""),
    "NetworkRaw": ("it waits for the network resource that it asked for", True, ""),
    # dependencies
    "Dependency": ("it starts after another job", True, ""),
    "DependencyNeverSatisfied": (
        "the job that it should follow can't end as the dependency asks",
        False,
        "'miles-hpc cancel', then 'miles-hpc resume'",
    ),
    # holds
    "JobHeldUser": ("you have put it on hold", False, "'scontrol release <job id>' lets it go"),
    "JobHeldAdmin": (
        "it is on hold: an operator did that, or Slurm, after it was requeued as often as MaxBatchRequeue allows",
        False,
        _HELD,
    ),
    "JobHoldMaxRequeue": ("it was requeued as often as MaxBatchRequeue allows and is on hold", False, _HELD),
    "launch_failed_requeued_held": ("its start failed on a node: Slurm requeued it and holds it", False, _HELD),
    "job_requeued_in_held_state": ("it was requeued on hold", False, _HELD),
    "user_env_retrieval_failed_requeued_held": ("your login environment couldn't be read on the node", False, _HELD),
    "RequeueExit": ("its exit code made Slurm requeue it", True, ""),
    "RequeueExitHold": ("its exit code made Slurm requeue it on hold", False, _HELD),
    "JobLaunchFailure": ("it could not be launched", None, "look at the newest attempt's log"),
    # nodes and partitions
    "PartitionDown": ("its partition is down", None, "it starts when the site brings that up again"),
    "PartitionInactive": ("its partition starts no jobs at present", None, "the site decides until when"),
    "PartitionNodeLimit": (
        "it asks for more or fewer nodes than its partition allows, or nodes that it needs are down",
        False,
        f"see 'scontrol show partition': {_RESUME}",
    ),
    "PartitionTimeLimit": (
        "job.time is longer than its partition allows",
        False,
        f"set a shorter job.time: {_RESUME}",
    ),
    "PartitionConfig": ("its partition's configuration excludes it", False, _OTHER_LIMIT),
    "AccountNotAllowed": ("its partition doesn't admit this account", False, "use another job.account or partition"),
    "QOSNotAllowed": ("its partition or account doesn't admit this QOS", False, "use another job.qos"),
    "ReqNodeNotAvail": ("nodes that it needs are in use, reserved, down or in maintenance", None, ""),
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": (
        "nodes that it needs are down, drained or reserved for partitions of higher priority",
        None,
        "'sinfo -R' says which nodes are down and why",
    ),
    "NodeDown": ("a node that it needs is down", None, "'sinfo -R' says why"),
    "FrontEndDown": ("no front end node can start it", None, "ask the site"),
    "BadConstraints": (
        "no node of its partition can ever give what it asks for (constraint, GPUs, CPUs or memory of a node)",
        False,
        f"compare the groups with 'sinfo -o \"%P %D %c %m %G %f\"': {_RESUME}",
    ),
    "Reservation": ("its reservation hasn't begun or is full", True, ""),
    "ReservationDeleted": ("its reservation was deleted", False, _RESUME),
    "ReqResv": ("its partition asks for a reservation", False, "name one in job.extra_directives"),
    "InvalidAccount": ("its account isn't valid", False, "use another job.account"),
    "InvalidQOS": ("its QOS isn't valid", False, "use another job.qos"),
    # limits without parts
    "AssociationJobLimit": ("your account runs as many jobs as it may", True, ""),
    "AssociationResourceLimit": ("your account has reached a limit", None, ""),
    "AssociationTimeLimit": ("your account has reached its time limit", None, "ask the project about its budget"),
    "QOSJobLimit": ("the QOS runs as many jobs as it may", True, ""),
    "QOSResourceLimit": ("the QOS has reached a limit", None, ""),
    "QOSTimeLimit": ("the QOS has reached its time limit", None, "use another job.qos"),
    "QOSUsageThreshold": ("your usage is too high for this QOS", None, "use another job.qos, or wait until it decays"),
    "AccountingPolicy": ("a rule of the accounting refuses it", None, "ask the site"),
    "DeadLine": ("it can't end before its deadline", False, _RESUME),
    "InactiveLimit": ("it was inactive for too long", False, _RESUME),
    "SystemFailure": ("Slurm, a file system or the network failed", None, "ask the site"),
    "TimeLimit": ("it has used up its time limit", False, "'miles-hpc resume' asks for the next allocation"),
    "NonZeroExitCode": ("its last start ended with an error", None, "look at the newest attempt's log"),
}  # fmt: skip

#: Reasons that are told apart by a table of their own; limits are read by their parts besides.
CODES = frozenset(_TABLE)

_RESOURCES = {
    "CPU": "CPUs", "Cpu": "CPUs", "Mem": "memory", "Memory": "memory", "Node": "nodes", "GRES": "GPUs",
    "BB": "burst buffer", "Billing": "billing units", "Energy": "energy", "License": "licences",
    "Unknown": "a resource", "Jobs": "jobs", "SubmitJobs": "submitted jobs", "SubmitJob": "submitted jobs",
    "Wall": "wall-clock time", "WallDuration": "wall-clock time", "CPUs": "CPUs",
}  # fmt: skip
_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS|)(?P<kind>Grp|Max|Min)"
    rf"(?P<resource>{'|'.join(sorted(_RESOURCES, key=len, reverse=True))})"
    r"(?P<unit>RunMinutes|Minutes|NotSatisfied|)(?P<per>Per(?:Job|Node|User|Account)|)(?:Limit)?\Z"
)
_DETAIL = re.compile(r"(?P<code>[^,(:]+?)[_ ]*[,(:][_ ]*(?P<detail>.*?)\)?\Z")


def explain_reason(reason: str) -> PendingReason:
    """Words for the reason of a pending job as scontrol or squeue prints it; "" and "None" are a reason too.

    Never raises: a code that isn't known stands for itself.
    """
    text = reason.strip()
    text = text[1:-1] if text.startswith("(") and text.endswith(")") else text  # squeue's %R
    code, detail = text.replace(" ", "_") or "None", ""
    if code not in _TABLE and (parts := _DETAIL.match(text)):
        code, detail = parts["code"].replace(" ", "_"), parts["detail"]
    if limit := _LIMIT.match(code):
        found = _limit_reason(code, limit)
    elif code in _TABLE:
        found = PendingReason("" if code == "None" else code, *_TABLE[code])
    else:
        return PendingReason(text, "a reason that this version doesn't know", None, "see 'man squeue'")
    if not detail:
        return found
    kind, _, nodes = detail.partition(":")
    if kind.startswith("Unavailable"):  # UnavailableNodes:h[1-2], in older versions Unavailable:h[1-2]
        if not nodes:
            return found
        meaning = f"{found.meaning}; unavailable: {nodes}"
        return replace(found, meaning=meaning, advice="'sinfo -R' says which of them need an operator")
    return replace(found, meaning=f"{found.meaning} ({detail.replace('_', ' ')})")


def _limit_reason(code: str, limit: re.Match[str]) -> PendingReason:
    """A limit by its parts. Grp: of everybody under the account or QOS together; Max: of a job, user or account."""
    whose = {"Assoc": "your account", "QOS": "the QOS", "": "your account under this QOS"}[limit["whose"]]
    resource, per, unit = _RESOURCES[limit["resource"]], limit["per"], limit["unit"]
    if limit["kind"] == "Min":
        return PendingReason(code, f"it asks for fewer {resource} than {whose} wants", False, _OTHER_LIMIT)
    if per in ("PerJob", "PerNode"):
        amount = f"{resource} x minutes" if unit else resource
        of = "a job" if per == "PerJob" else "a node of it"
        return PendingReason(code, f"{of} may not have so many {amount} under {whose}", False, _OTHER_LIMIT)
    if unit == "Minutes":
        meaning = f"the budget of {resource} x minutes of {whose} is used up, or this job would exceed it"
        return PendingReason(code, meaning, False, "ask the project for budget, or use another job.account")
    if unit == "RunMinutes":
        meaning = f"running jobs under {whose} have as many {resource} x minutes before them as allowed"
        return PendingReason(code, meaning, True, "a shorter job.time may start sooner")
    if limit["kind"] == "Grp":
        meaning = f"all jobs under {whose} together have reached its limit of {resource}"
        return PendingReason(code, meaning, True, "never if this job alone asks for more than the limit")
    who = {"PerUser": "your jobs", "PerAccount": "your account's jobs", "": "your jobs"}[per]
    note = "a het job counts once per component" if resource.endswith("jobs") else "unless this job alone is above it"
    return PendingReason(code, f"{who} have reached the limit of {resource} of {whose}", True, note)
