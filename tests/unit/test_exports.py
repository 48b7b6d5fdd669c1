"""Variables through the batch script: the environment of what it starts is, byte by byte, what was to be exported."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.cluster.job_plan import plan_job
from miles_hpc.cluster.render import bash_quote, render_job
from miles_hpc.cluster.site import template_folders
from miles_hpc.core.errors import UserError
from miles_hpc.core.paths import RunPaths
from tests.exploring import examples
from tests.unit.runs import make_run, make_site

#: Values that some way of writing a script loses or runs.
NASTY = {
    "SPACES": "  two  words  ",
    "COMMAS": "mlx5_0,mlx5_1:1",
    "DOLLAR": "$HOME ${PATH} $(touch /tmp/never) `touch /tmp/never` $$",
    "QUOTES": "it's \"quoted\" '",
    "BACKSLASHES": "\\ \\n \\\\ ends with \\",
    "LINES": "one\ntwo\n#SBATCH --nodes=99\n\n",
    "DOS": "one\r\ntwo\r\n",
    "TAB_AND_BELL": "\t\a\x1b[0m\x7f\x011",
    "PERCENT": "%j %A 100%",
    "JINJA": "{{ plan.run_dir }} {% raw %} {# #}",
    "UNICODE": "grüße 日本 \U0001f9ea \u2028 \u00a0",
    "DASHES": "--export=NONE",
    "EQUALS": "=a=b",
    "GLOBS": "* ? [a-z] ~ !! {1..3}",
    "HASH": "# no comment",
    "SEMICOLON": "a; b && c | d > e",
    "EMPTY": "",
}


_PLAIN = plan_job(make_run(), make_site(), RunPaths(Path("/runs/tiny")))
_DIRECTIVES = sum(len(component.directives) for component in _PLAIN.components) + len(_PLAIN.components) - 1


def exported(exports: dict[str, str], folder: Path) -> dict[str, str]:
    """What the batch script's first program has of these variables, after real bash ran the rendered script."""
    program = folder / "python"
    if not program.exists():
        program.write_text("#!/bin/sh\nexec env -0\n")
        program.chmod(0o755)
    plan = plan_job(make_run(f"python.controller={program}"), make_site(), RunPaths(Path("/runs/tiny")))
    text = render_job(replace(plan, exports=exports), template_folders())
    assert len([line for line in text.splitlines() if line.startswith("#SBATCH")]) == _DIRECTIVES
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]}, check=True
    )
    assert done.stderr == b""
    pairs = dict(line.split(b"=", 1) for line in done.stdout.split(b"\0") if line)
    return {name: os.fsdecode(pairs[name.encode()]) for name in exports}


def test_nasty_values_arrive(tmp_path: Path) -> None:
    assert exported(NASTY, tmp_path) == NASTY


@settings(max_examples=examples(60))
@given(
    st.dictionaries(
        st.from_regex(r"X_[A-Za-z0-9_]{0,8}", fullmatch=True),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
        max_size=5,
    )
)
def test_any_value_arrives(tmp_path_factory: pytest.TempPathFactory, exports: dict[str, str]) -> None:
    folder = tmp_path_factory.getbasetemp() / "exports"
    folder.mkdir(exist_ok=True)
    assert exported(exports, folder) == exports


@given(st.text(st.characters(exclude_characters="\0"), max_size=40))
def test_a_quoted_word_is_one_line(text: str) -> None:
    assert len(bash_quote(text).split("\n")) == 1
    assert "\r" not in bash_quote(text)


def test_plain_words_stay_plain_and_a_nul_is_refused() -> None:
    assert bash_quote("/usr/bin/python3") == "/usr/bin/python3"
    assert bash_quote("a\nb'1") == "$'a\\012b\\'1'"
    with pytest.raises(UserError, match=r"a NUL character can't be passed on"):
        bash_quote("a\0b")
