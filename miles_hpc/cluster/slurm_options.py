"""Which Slurm knows which option: by the version that brought it, and by the plug-in. Data, and pure look-ups.

Only options that a run or a site file may state and that some Slurm in use lacks: what every version since 22.05 has
isn't listed, and no option that matters here was taken away since. tests/slurm asks a real sbatch of 22.05 for each
entry. It takes any text as the value of --network, so that only this table tells of a missing VNI.

Sources: CHANGELOG/slurm-<version>.md of https://github.com/SchedMD/slurm (each "Add ..." below), the manual pages
sbatch(1) and srun(1); NVIDIA/pyxis and the Container Engine's pages of eth-cscs/cscs-docs for plug-ins' options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["OPTIONS", "PLUGIN_OPTIONS", "SlurmOption", "option_complaints", "version_of"]

Version = tuple[int, ...]


@dataclass(frozen=True)
class SlurmOption:
    """A long option, or one value of it. `value` = "" means the option itself, whatever its value."""

    name: str
    value: str = ""
    since: Version = ()  # (24, 5) for 24.05
    instead: str = ""  # what to state where it is missing; "" = nothing does the same
    command: Literal["sbatch", "srun"] = "sbatch"  # srun: steps only
    source: str = ""

    @property
    def text(self) -> str:
        return f"{self.name}={self.value}" if self.value else self.name


OPTIONS = (
    SlurmOption("--tres-per-task", since=(23, 2), source="CHANGELOG 23.02"),
    SlurmOption("--network", "job_vni", since=(23, 2), source="CHANGELOG 23.02: job VNIs that users ask for"),
    SlurmOption("--network", "single_node_vni", since=(23, 2), source="CHANGELOG 23.02"),
    SlurmOption("--segment", since=(24, 5), source="CHANGELOG 24.05: for topology/block"),
    SlurmOption("--exclusive", "topo", since=(24, 5), source="CHANGELOG 24.05: for topology/block"),
    SlurmOption("--stepmgr", since=(24, 5), source="CHANGELOG 24.05 (enable_stepmgr), sbatch(1)"),
    SlurmOption(
        "--wait-for-children", since=(25, 5), command="srun", source="release notes of 25.05: steps under cgroup/v2"
    ),
    SlurmOption("--consolidate-segments", since=(25, 11), source="release notes of 25.11"),
    SlurmOption("--spread-segments", since=(25, 11), source="release notes of 25.11"),
    SlurmOption("--requeue", "expedite", since=(25, 11), instead="--requeue", source="release notes of 25.11"),
    SlurmOption(
        "--network", "unique-channel-per-segment", since=(25, 11), source="CHANGELOG 25.11: switch/nvidia_imex"
    ),
)

#: Options that Slurm has only where a site has put the plug-in into plugstack.conf: option -> runtime in the site file.
PLUGIN_OPTIONS = {
    "--container-image": "enroot",
    "--container-mounts": "enroot",
    "--container-name": "enroot",
    "--container-workdir": "enroot",
    "--container-env": "enroot",
    "--environment": "cscs-ce",
}


def version_of(text: str) -> Version:
    """The first dotted number in "slurm-wlm 22.05.8", as a tuple that compares; () when there is none."""
    found = re.search(r"\d+(\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def option_complaints(
    directives: Iterable[str], version: Version, *, runtimes: Iterable[str] = (), version_text: str = ""
) -> Iterator[str]:
    """Which of a script's options this Slurm doesn't know, in a line each.

    `version` () is a version that nobody knows: nothing is complained of then, but for plug-ins' options.
    `runtimes` are the site's container runtimes; an option of a plug-in that isn't among them is a complaint.
    """
    known = set(runtimes)
    shown = version_text or "Slurm " + ".".join(map(str, version))
    for directive in directives:
        name, value = (*re.split(r"[=\s]+", directive, maxsplit=1), "")[:2]
        for option in OPTIONS:
            if option.name != name or (option.value and option.value not in value.split(",")):
                continue
            if version and version < option.since:
                way_out = f"state {option.instead} instead" if option.instead else "take it out"
                since = "{}.{:02d}".format(*option.since)
                yield f"{option.text} is there from Slurm {since} on, this is {shown}: {way_out}"
        if name in PLUGIN_OPTIONS and PLUGIN_OPTIONS[name] not in known:
            yield (
                f"{name} is an option of the plug-in for {PLUGIN_OPTIONS[name]}, and container.runtimes of the site "
                f"file are {', '.join(sorted(known)) or 'not known'}: take it out, or add the runtime"
            )
