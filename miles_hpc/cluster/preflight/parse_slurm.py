"""What Slurm's commands print, as data. Pure."""

from __future__ import annotations

import re

__all__ = ["controllers", "mpi_plugins", "parameters", "slurm_config"]

# "MPI plugin types are...", "srun: MPI types are...": sentences of the list that aren't entries.
_SENTENCE = re.compile(r"types are|available:|^\s*$|error:|fatal:|warning:", re.IGNORECASE)


def slurm_config(text: str) -> dict[str, str]:
    """`scontrol show config` by key; "(null)" and "(none)" are "". Lines of other shapes are left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z][\w()]*", key.strip()):
            value = value.strip()
            found[key.strip()] = "" if value in ("(null)", "(none)", "N/A") else value
    return found


def parameters(value: str) -> dict[str, str]:
    """A list such as "bf_interval=1,disable_hetjob_steps" as a table; flags have the value ""."""
    parts = [part.strip() for part in value.split(",") if part.strip()]
    return {key: rest for key, _, rest in (part.partition("=") for part in parts)}


def mpi_plugins(text: str) -> set[str]:
    """Names that `srun --mpi=list` tells, on stdout or stderr, one a line or several, with or without "srun: ".

    Versions are told apart from 22.05 on ("specific pmix plugin versions available: pmix_v4"): a version stands for
    its plugin too.
    """
    found: set[str] = set()
    for line in text.splitlines():
        line = re.sub(r"^\s*srun:\s*", "", line)
        if "versions available:" in line:
            line = line.partition("available:")[2]
        elif _SENTENCE.search(line):
            continue
        found |= set(re.findall(r"[a-z][a-z0-9_]*", line))
    return found | {name.partition("_v")[0] for name in found if re.search(r"_v\d+\Z", name)}


def controllers(text: str) -> dict[str, bool]:
    """Hosts of slurmctld that `scontrol ping` names, each with whether it is up."""
    return {host: state == "UP" for host, state in re.findall(r"at (\S+) (?:is|are) (UP|DOWN)", text)}
