"""Every environment variable that the project reads, in one table. Nothing else touches os.environ for input.

Slurm's variables are inputs as well; a malformed value is an error that names the variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles_hpc.core.errors import UserError

__all__ = ["VARIABLES", "Variable", "read"]


@dataclass(frozen=True)
class Variable:
    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("expected 0 or 1")


VARIABLES: dict[str, Variable] = {
    v.name: v
    for v in (
        Variable("MILES_HPC_SITE", str, "", "site to use instead of the run file's; --site overrides it"),
        Variable("MILES_HPC_SITES", str, "", "folder of site files that is searched before the project's own"),
        Variable("MILES_HPC_TEMPLATES", str, "", "folder of job templates that is searched before the project's own"),
        Variable("MILES_HPC_DEBUG", _flag, False, "print tracebacks for user errors as well"),
        Variable("SLURM_CLUSTER_NAME", str, "", "Slurm's name of the cluster, inside a job"),
        Variable("SLURM_CONF", str, "", "Slurm's configuration file"),
        Variable("SLURM_JOB_ID", int, None, "the leader's job id"),
        Variable("SLURM_RESTART_COUNT", int, 0, "how often Slurm has restarted this job"),
        Variable("SLURM_HET_SIZE", int, 1, "number of het groups"),
        Variable("SLURM_PROCID", int, 0, "rank in the step"),
        Variable("PMI_FD", int, None, "descriptor of this rank's connection to its process manager"),
        Variable("PMI_RANK", int, 0, "rank in the MPI world, from a process manager without Slurm"),
        Variable("PMI_SIZE", int, None, "ranks of the MPI world, from the process manager that started it"),
        Variable("SLURM_NTASKS", int, 1, "tasks of the step; of a step over het groups: of all of them"),
        Variable("SLURM_LOCALID", int, 0, "rank on this node"),
        Variable("SLURM_NODEID", int, 0, "node number in the step"),
        Variable("SLURMD_NODENAME", str, "", "Slurm's name of this node"),
        Variable("SLURM_STEP_ID", str, "", "this step"),
        Variable("SLURM_JOB_END_TIME", int, None, "epoch second at which the allocation ends (Slurm 23.02 and later)"),
        Variable("LD_LIBRARY_PATH", str, "", "given to the sandbox launcher's interpreter, not to sandboxes"),
        Variable("SLURM_LAUNCH_NODE_IPADDR", str, "", "address of the host on which srun was started: the batch host"),
        Variable("SLINGSHOT_VNIS", str, "", "virtual networks of this step, the job's last (cluster/slingshot.py)"),
        Variable("CUDA_VISIBLE_DEVICES", str, None, "devices of this task"),
    )
}


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The parsed value, or the table's default when unset. Raises UserError for a malformed value."""
    variable = VARIABLES[name]
    text = (os.environ if environ is None else environ).get(name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise UserError(f"environment variable {name}={text!r}: {error}; {variable.doc}") from error
