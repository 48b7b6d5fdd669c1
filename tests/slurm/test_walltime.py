"""Times against the real sbatch: what limit a held job gets for each form, and which forms are refused."""

from __future__ import annotations

import random
import re
import subprocess

import pytest

from miles_hpc.core.errors import UserError
from miles_hpc.core.walltime import MAX_S, format_time, limit_s
from tools.slurm_box import Box

pytestmark = pytest.mark.slurm

FORMS = [
    *("0", "1", "59", "60", "0001", "525600", "0:01", "0:30", "0:31", "1:00", "1:60", "10:00", "10:00:00", "1:2:3"),
    *("1-", "1-2", "1-25", "1-2:3", "1-2:3:4", "0-0", "0-0:0:1", "00:00:00", "1:99:99", "infinite", "UNLIMITED", "-1"),
    *("", "soon", "1h", "1d", "1.5", "+1", "--1", "1:-1", "1:", ":1", "-", "1-:", "1-:3", "1-2:", "1-2:3:4:5"),
    *("1:2:3:4", " 10", "10 ", "1 2", "1,2", "0x10", "inf", "nan", "infinity", "UNLIMITE", "\u0661\u0660"),
    str(MAX_S // 60),
]
#: What sbatch takes for a limit of millions of days, or none, and is refused here.
NONSENSE = {
    "-0": "UNLIMITED",
    "-2": "2982614-04:17:00",
    "-5": "2982611-04:17:00",
    str(MAX_S // 60 + 1): "2957761-01:03:00",
}


def limit(box: Box, text: str) -> str | None:
    """The limit of a held job as scontrol shows it, None when sbatch refuses `text`."""
    command = ["sbatch", "--parsable", "--hold", "--nodes=1", "--output=/dev/null", f"--time={text}", "--wrap=true"]
    done = subprocess.run(command, env=box.env(), capture_output=True, text=True, timeout=60)
    if done.returncode:
        assert "Invalid --time specification" in done.stderr
        return None
    job = done.stdout.strip()
    shown = box.run("scontrol", "-o", "show", "job", job)
    box.run("scancel", job)
    found = re.search(r" TimeLimit=(\S+)", shown)
    assert found is not None
    return found[1]


def ours(text: str) -> str | None:
    try:
        return format_time(limit_s(text))
    except UserError:
        return None


def generated(count: int) -> list[str]:
    rng = random.Random("times")
    texts = []
    for _ in range(count):
        text = ":".join(str(rng.randint(0, 99)).zfill(rng.randint(1, 2)) for _ in range(rng.randint(1, 4)))
        if rng.random() < 0.4:
            text = f"{rng.randint(0, 400)}-{text}"
        if rng.random() < 0.3:
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(":-.0 x") + text[at:]
        texts.append(text)
    return texts


def test_limits_agree_with_sbatch(clean_box: Box) -> None:
    texts = [text for text in (*FORMS, *generated(150)) if not text.startswith("-") or text in FORMS]
    answers = {text: limit(clean_box, text) for text in texts}
    assert {text: ours(text) for text in texts} == answers
    assert len({text for text, answer in answers.items() if answer is None}) > 40  # both ways were tried


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_that_sbatch_takes_is_refused_here(clean_box: Box, text: str) -> None:
    assert (limit(clean_box, text), ours(text)) == (NONSENSE[text], None)
