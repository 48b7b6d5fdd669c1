"""Side jobs by name: which function, on whose nodes, how long. A pure table, so that --help needs nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from miles_hpc.cluster.side_plan import SideRequest
from miles_hpc.core.errors import UserError

__all__ = ["KINDS", "make_request", "parse_arguments"]

#: CPU nodes first: reading a checkpoint needs no GPU.
_CPU_FIRST = ("sandbox", "rollout", "trainer")

#: Requests that lack `run_dir` only. Those whose function takes it have it in their arguments.
KINDS: dict[str, SideRequest] = {
    request.name: request
    for request in (
        SideRequest(
            name="verify-checkpoint",
            function="miles_hpc.cluster.side_tasks:check_checkpoint",
            arguments={"run_dir": ""},
            roles=_CPU_FIRST,
            python_role="controller",
        ),
        SideRequest(
            name="export",
            function="miles_hpc.trainer.export:export_checkpoint",
            arguments={"run_dir": ""},
            roles=_CPU_FIRST,
            python_role="trainer",
            time="01:00:00",
        ),
        SideRequest(
            name="eval",
            function="launchers.evaluate:evaluate_checkpoint",
            arguments={"run_dir": ""},
            roles=("rollout",),
            time="01:00:00",
        ),
        SideRequest(
            name="doctor",
            function="miles_hpc.cluster.side_tasks:run_program",
            arguments={
                "module": "miles_hpc.cluster.preflight.on_node",
                "arguments": ["--site", "{run_dir}/site.toml", "--run-dir", "{run_dir}", "--json"],
            },
            roles=("trainer",),
            time="00:10:00",
            mpi=True,
        ),
    )
}


def make_request(name: str, run_dir: Path, arguments: dict[str, Any], **changes: Any) -> SideRequest:
    """The request for a kind, or for "module:function", with what the user gave. Raises UserError for neither.

    `changes` are fields of SideRequest; None leaves one as it is. A program's command line may hold {run_dir}.
    """
    if name in KINDS:
        request = KINDS[name]
    elif ":" in name:
        label = name.rpartition(":")[2].strip("_").lower().replace("_", "-")[:32]
        request = SideRequest(name=label, function=name, roles=_CPU_FIRST)
    else:
        raise UserError(f"no side job '{name}': expected one of {', '.join(KINDS)}, or module:function")
    given = {**request.arguments, **arguments}
    if "run_dir" in request.arguments:
        if "run_dir" in arguments:
            raise UserError(f"--arg run_dir={arguments['run_dir']}: '{name}' takes the run directory before its name")
        given["run_dir"] = str(run_dir)
    if isinstance(line := given.get("arguments"), list):
        given["arguments"] = [str(word).replace("{run_dir}", str(run_dir)) for word in line]
    return replace(request, arguments=given, **{key: value for key, value in changes.items() if value is not None})


def parse_arguments(texts: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a value that is JSON is what it says, anything else is text. Raises UserError."""
    import json

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--arg {text}: expected KEY=VALUE, for example step=100")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
