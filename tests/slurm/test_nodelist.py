"""Host lists against the real scontrol, over generated valid lists, mutated ones and lists of names.

What is generated depends on the seed alone, so a failure comes again. MILES_HPC_TEST_LISTS sets how many lists.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from miles_hpc.cluster.nodelist import MAX_HOSTS, compress, expand
from miles_hpc.core.errors import UserError
from tools.slurm_box import Box

pytestmark = pytest.mark.slurm

COUNT = int(os.environ.get("MILES_HPC_TEST_LISTS", "800"))  # of each of the three kinds

#: What scontrol answers to lists whose brackets don't pair, and `expand` refuses.
UNPAIRED = {
    "a[1": ["a]"],
    "a[1-2,": ["a]"],
    "a[1-2,b": ["a]", "b"],
    "a[1][2": ["a[1]]"],
    "a[1][": ["a[1]]"],
    "a]": ["a]"],
    "]a": ["]a"],
    "a],b[1]": ["a]", "b1"],
    "a[1],b]": ["a1", "b]"],
    "a[1],[": ["a1"],
    "[": [],
    "a[x": ["a]"],
    "a[2-1": ["a]"],
}
#: A line break is part of a name for scontrol before 23.02. Names without brackets come out right all the same.
LINES = {
    "a\nb": (["a", "b"], ["a", "b"]),
    "a\nb[1-2]": (["a", "b1", "a", "b2"], ["a", "b1", "b2"]),
    "a[1-2]\nb[1-2]": (["a1", "b1", "a1", "b2", "a2", "b1", "a2", "b2"], ["a1", "a2", "b1", "b2"]),
    "a[1-2]\nb": (None, ["a1", "a2", "b"]),
}


def scontrol(environ: dict[str, str], text: str) -> list[str] | None:
    """Hosts as scontrol expands `text`, None when it refuses it. A comma in front: a list may begin with a dash."""
    done = subprocess.run(
        ["scontrol", "show", "hostnames", f",{text}"], env=environ, capture_output=True, timeout=60, check=True
    )
    if done.stderr:
        return None
    return [line for line in done.stdout.decode(errors="surrogateescape").split("\n") if line]


def hostlist(environ: dict[str, str], hosts: list[str]) -> str:
    """Names as scontrol compresses them."""
    command = ["scontrol", "show", "hostlist", f",{','.join(hosts)}"]
    return subprocess.run(command, env=environ, capture_output=True, timeout=60, check=True).stdout.decode().strip()


def ours(text: str) -> list[str] | None:
    try:
        return expand(text)
    except UserError:
        return None


def paired(text: str) -> bool:
    depth = 0
    for char in text:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            return False
    return depth == 0


# ------------------------------------------------------------------------------------------------ what is generated

_LETTERS = "abcnxyz-_.0123456789"
_MUTATIONS = "[]-,x 0199+a.\t:"


def a_prefix(rng: random.Random) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(0, 5)))


def a_range(rng: random.Random) -> str:
    first = rng.choice((rng.randint(0, 12), rng.randint(0, 2000), rng.randint(0, 10**9)))
    low = str(first).zfill(rng.randint(1, 6))
    if rng.random() < 0.4:
        return low
    return f"{low}-{str(first + rng.randint(0, 12)).zfill(rng.randint(1, 6))}"


def a_name(rng: random.Random, most: int) -> str:
    parts = [a_prefix(rng) or "n"]
    for _ in range(min(most, rng.choice((0, 0, 1, 1, 1, 2, 3)))):
        parts += [f"[{','.join(a_range(rng) for _ in range(rng.randint(1, 3)))}]", a_prefix(rng)]
    return "".join(parts[:-1] if len(parts) > 1 else parts)  # nothing stands behind the last bracket


def a_list(rng: random.Random, most: int = 3) -> str:
    return rng.choice((",", ",", " ", "\t")).join(a_name(rng, most) for _ in range(rng.randint(1, 4)))


def a_mutated_list(rng: random.Random) -> str:
    text = a_list(rng, 2)  # a range that grew, times two others, is millions of hosts
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        kind = rng.random()
        if kind < 0.5:
            text = text[:at] + rng.choice(_MUTATIONS) + text[at:]
        elif kind < 0.8:
            text = text[:at] + text[at + 1 :]
        else:
            text = text[:at]
    return text


def some_hosts(rng: random.Random) -> list[str]:
    hosts: list[str] = []
    for _ in range(rng.randint(1, 4)):
        prefix, first, width = a_prefix(rng), rng.choice((0, 8, 98, rng.randint(0, 10**6))), rng.randint(1, 5)
        numbers = [str(first + i).zfill(width) for i in range(rng.randint(1, 6))]
        if rng.random() < 0.3:
            rng.shuffle(numbers)
        hosts += [f"{prefix}{number}" for number in numbers] if rng.random() < 0.9 else [prefix or "login"]
    return hosts


def generated(kind: str, make: Callable[[random.Random], object]) -> Iterable[object]:
    rng = random.Random(f"host lists, {kind}")
    return [make(rng) for _ in range(COUNT)]


# ------------------------------------------------------------------------------------------------ the comparison


@pytest.mark.parametrize(("kind", "make"), [("valid", a_list), ("mutated", a_mutated_list)])
def test_expansion_agrees_with_scontrol(box: Box, kind: str, make: Callable[[random.Random], str]) -> None:
    texts = [str(text) for text in generated(kind, make)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(partial(scontrol, box.env()), texts))
    expected = [
        answer if paired(text) and len(answer or ()) <= MAX_HOSTS else None
        for text, answer in zip(texts, answers, strict=True)
    ]
    seen = [ours(text) for text in texts]
    wrong = [case for case in zip(texts, expected, seen, strict=True) if case[1] != case[2]]
    assert not wrong, f"{len(wrong)} differ: {str(wrong[0])[:500]}"  # pytest would compare them all
    refused = sum(answer is None for answer in answers)
    assert (refused == 0) if kind == "valid" else (refused > COUNT // 10)  # both ways were tried


def test_compression_agrees_with_scontrol(box: Box) -> None:
    lists = [list(hosts) for hosts in generated("hosts", some_hosts)]  # type: ignore[call-overload]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(partial(hostlist, box.env()), lists))
        backs = list(pool.map(partial(scontrol, box.env()), map(compress, lists)))
    wrong = [
        (hosts, text, compress(hosts), back)
        for hosts, text, back in zip(lists, texts, backs, strict=True)
        if not (compress(hosts) == text and back == hosts)
    ]
    assert not wrong, f"{len(wrong)} differ: {str(wrong[0])[:500]}"


@pytest.mark.parametrize("text", UNPAIRED)
def test_unpaired_brackets_are_refused_here_only(box: Box, text: str) -> None:
    assert scontrol(box.env(), text) == UNPAIRED[text]
    with pytest.raises(UserError, match=r"without its partner|is not a number"):
        expand(text)


@pytest.mark.parametrize("text", LINES)
def test_line_breaks_separate_names_here_only(box: Box, text: str) -> None:
    assert (scontrol(box.env(), text), expand(text)) == LINES[text]
