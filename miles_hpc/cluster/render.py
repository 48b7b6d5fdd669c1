"""Job text from a plan, through a Jinja2 template that holds plain bash. An undefined name is an error."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from miles_hpc.cluster.job_plan import JobPlan
from miles_hpc.core.errors import UserError

__all__ = ["bash_quote", "render_job"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def bash_quote(text: str) -> str:
    """`text` as one word of bash, on one line whatever is in it. Raises UserError for a NUL, which no variable holds.

    Control characters come as escapes ($'...', bash(1), QUOTING): a raw line break could begin a line with #SBATCH,
    and sbatch refuses a script in which a carriage return stands before one.
    """
    if "\0" in text:
        raise UserError(f"{text!r}: a NUL character can't be passed on: take it out")
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    octal = _CONTROL.sub(lambda found: f"\\{ord(found[0]):03o}", escaped)  # three digits: what follows may be one
    return f"$'{octal}'"


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
    environment.filters["quote"] = lambda value: bash_quote(str(value))
    try:
        return environment.get_template(template).render(plan=plan)
    except jinja2.TemplateNotFound as error:
        where = ", ".join(str(folder) for folder in folders)
        raise UserError(f"job template {error.name}: not found in {where}") from error
    except jinja2.TemplateError as error:
        raise UserError(f"job template {template}: {error}") from error
