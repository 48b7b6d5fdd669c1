"""Job text from a plan, through a Jinja2 template that holds plain bash. An undefined name is an error."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from miles_hpc.cluster.job_plan import JobPlan
from miles_hpc.core.errors import UserError

__all__ = ["render_job"]


def render_job(plan: JobPlan, folders: Sequence[Path], template: str = "job.sh.j2") -> str:
    """The batch script. The first of `folders` that has `template` wins. Raises UserError when rendering fails."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(folder) for folder in folders]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # bash, not HTML: values go through `quote`
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    try:
        return environment.get_template(template).render(plan=plan)
    except jinja2.TemplateNotFound as error:
        where = ", ".join(str(folder) for folder in folders)
        raise UserError(f"job template {error.name}: not found in {where}") from error
    except jinja2.TemplateError as error:
        raise UserError(f"job template {template}: {error}") from error
