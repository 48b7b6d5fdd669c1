r"""Whether two answers are the same: numbers, expressions, units, lists, sets, intervals, relations, matrices, words.

| written | read as |
|---|---|
| 0.5, 1/2, \frac12, 5e-1, 50\%, \frac{\sqrt4}{4} | one exact value |
| 1,234 and 1{,}234 | a number with thousands; between brackets, and before a space, a comma separates |
| 1 1/2, 1\frac{1}{2} | a mixed number |
| 5 cm, 5\text{ cm}, 90^\circ | value and unit; a unit on one side only is no difference, two different units are one |
| 50\% against 50 | a percent sign on one side only may be a unit or a factor 1/100: both readings hold |
| x = 5, x \in [0, 1] | what follows, if the other side names no variable or the same one |
| 1, 2 and 2; \pm 2 | a list in any order |
| \{1, 2\} | a set: any order, each member once |
| (1, 2), [0, 1), A \cup B | in order, with the kind of the brackets; a union in any order |
| everything else | words, without regard to case, space and LaTeX's text commands |

Numbers are compared exactly: 0.333 isn't 1/3. What is too long or too hard to understand is compared as words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from miles_hpc.rollout.reward.exact import Budget, TooHard, Value, named, number
from miles_hpc.rollout.reward.latex import MAX_TEXT, parse_value, tokenize
from miles_hpc.rollout.reward.notation import UNITS

__all__ = ["answers_equal", "last_boxed"]

_MAX_ITEMS = 64
_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne"}
_COMMAS = {",", ";"}
_TURNED = {"<": ">", r"\le": r"\ge"}  # read from the right
_OPENING, _CLOSING = {"(", "[", r"\{", "{"}, {")", "]", r"\}", "}"}
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_JOINING = re.compile(r",?\s*\\(?:text|textrm|mbox|mathrm)\s*\{\s*(?:and|or)\s*\}")
_POWER = r"(?:\s*\^\s*(?:\{\s*(\d)\s*\}|(\d)))?\s*"
_UNIT_TEXT = re.compile(_TEXT.pattern + _POWER + r"\Z")
_UNIT_WORD = re.compile(r"([A-Za-z]+(?:/[A-Za-z]+)?)" + _POWER + r"\Z")
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_DEGREE = re.compile(r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°|\\degree)\s*\Z")


@dataclass(frozen=True, slots=True)
class _Many:
    """Several answers: `kind` list, set, union, matrix, ratio, relation, or a pair of brackets such as "(]"."""

    kind: str
    items: tuple[_Answer, ...]
    name: str = ""  # of a relation: its signs; of an equation that was read as its right side: the left one


@dataclass(frozen=True, slots=True)
class _One:
    value: Value
    unit: str = ""


_Answer = _One | _Many


def last_boxed(text: str, *, max_chars: int = 10_000) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} of a text holds, braces within it balanced.

    None when there is none, or when the last one isn't closed within `max_chars`: a text that was cut has no answer.
    Looks at the last million characters only, so that a text of any length takes bounded time.
    """
    end = len(text)
    low = max(0, end - 1_000_000)
    for _ in range(16):  # a mention without braces is passed over
        start = max(text.rfind(r"\boxed", low, end), text.rfind(r"\fbox", low, end))
        if start < 0:
            return None
        opened = _BOX.match(text, start)
        if opened is not None:
            return _balanced(text, opened.end(), max_chars)
        end = start
    return None


def _balanced(text: str, start: int, max_chars: int) -> str | None:
    depth, at, limit = 1, start, min(len(text), start + max_chars)
    while at < limit:
        if text[at] == "\\":
            at += 1  # \{ and \} are no braces of LaTeX
        elif text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at].strip()
        at += 1
    return None


def answers_equal(given: str, expected: str) -> bool:
    """Whether both texts are the same answer. Never raises; takes bounded time and memory for any text."""
    if len(given) > MAX_TEXT or len(expected) > MAX_TEXT:
        return given == expected or (len(given) < 10 * MAX_TEXT and given.strip() == expected.strip())
    given, expected = _unwrapped(given), _unwrapped(expected)
    if not given or not expected:
        return False
    if _words(given) == _words(expected):
        return True
    budget = Budget()
    try:
        return _same(_read(given, budget), _read(expected, budget), budget)
    except TooHard:
        return _same_tokens(given, expected)


def _same_tokens(given: str, expected: str) -> bool:
    """Whether both are one expression that wasn't evaluated, such as 9**9**9 and 9^9^9."""
    try:
        return tokenize(given) == tokenize(expected)
    except TooHard:
        return False


# --------------------------------------------------------------------------------------------- words and units


def _unwrapped(text: str) -> str:
    r"""Without what only surrounds an answer: $...$, \(...\), a full stop, \text{...} around all of it."""
    text = text.strip()
    for _ in range(8):
        before = text
        text = text.rstrip(".,;").strip()
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")):
            if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right):
                text = text[len(left) : -len(right)].strip()
        whole = _TEXT.fullmatch(text)
        if whole is not None:
            text = whole[1].strip()
        if text == before:
            break
    return text


def _words(text: str) -> str:
    """Text as words: commands for text, white space and, beyond single letters, case don't matter."""
    text = re.sub(r"\\[,;:!> ]|[~$]|(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", text))
    return text.casefold() if re.search(r"[A-Za-z]{3}", text) else text


def _split_unit(text: str) -> tuple[str, str]:
    """(what stands before the unit, the unit's name or "")."""
    dollars = text.startswith((r"\$", "$"))
    text = text.removeprefix(r"\$").removeprefix("$")
    parts: list[str] = []
    for _ in range(4):
        text = text.rstrip().rstrip("~").rstrip()
        if text.endswith("%"):
            text, part = text[:-1].removesuffix("\\"), "percent"
        elif (match := _DEGREE.search(text)) is not None:
            text, part = text[: match.start()], "degree"
        elif (match := _UNIT_TEXT.search(text[-80:])) is not None or (
            (match := _UNIT_WORD.search(text[-40:])) is not None and _is_unit(match[1])
        ):
            part = _unit_name(match[1]) + "^" + (match[2] or match[3] or "1")
            text = text[: len(text) - len(match[0])]
        else:
            break
        parts.insert(0, part.removesuffix("^1"))
    unit = " ".join([*(["dollar"] if dollars else []), *parts]).replace(" per ", "/")
    for word, raised in (("square ", "^2"), ("cubic ", "^3")):
        unit = unit.removeprefix(word) + raised if unit.startswith(word) else unit
    return text.strip(), unit


def _is_unit(word: str) -> bool:
    return word in UNITS or word in ("square", "cubic", "per") or all(part in UNITS for part in word.split("/"))


def _unit_name(word: str) -> str:
    names = [UNITS.get(part.strip(), part.strip().casefold()) for part in word.split("/")]
    return "/".join(" ".join(UNITS.get(w, w.removesuffix("s")) for w in name.split()) or name for name in names)


# --------------------------------------------------------------------------------------------- structure


def _read(text: str, budget: Budget) -> _Answer:
    """The structure of an answer; raises TooHard for words."""
    rest, unit = _split_unit(_JOINING.sub(", ", text))
    if not rest:
        raise TooHard("a unit without a number")
    return _structure(tokenize(rest), unit, budget)


def _structure(tokens: Sequence[str], unit: str, budget: Budget) -> _Answer:
    budget.spend(len(tokens) + 1)
    if not tokens:
        raise TooHard("nothing")
    relations = [t for t in _outer(tokens) if t in _RELATIONS]
    parts = _split(tokens, _COMMAS)
    if len(relations) > 1 and len(parts) > 1 and all(_RELATIONS & set(_outer(part)) for part in parts):
        return _Many("list", _flat("list", [_structure(part, unit, budget) for part in parts]))
    if relations:
        return _relation(relations, _split(tokens, _RELATIONS), unit, budget)
    if r"\in" in tokens:
        left, *right = _split(tokens, {r"\in"})
        if len(right) != 1:
            raise TooHard("two memberships")
        return _Many("=", (_structure(right[0], unit, budget),), parse_value(left, budget).text())
    for separators, kind in ((_COMMAS, "list"), ({r"\cup"}, "union"), ({":"}, "ratio")):
        parts = _split(tokens, separators)
        if len(parts) > 1:
            return _Many(kind, _flat(kind, [_structure(part, unit, budget) for part in parts]))
    signs = [t for t in tokens if t in (r"\pm", r"\mp")]
    if signs:
        both = [_structure(_signed(tokens, turned), unit, budget) for turned in (False, True)]
        return _Many("list", _flat("list", both))
    return _brackets(tokens, budget) or _single(tokens, unit, budget)


def _single(tokens: Sequence[str], unit: str, budget: Budget) -> _One:
    bare = tokens[1:] if tokens[0] in ("+", "-") else tokens
    if len(bare) == 1 and (bare[0] == r"\infty" or bare[0].startswith(r"\mathbb{")):
        value = named(bare[0])
        return _One(value.negative() if tokens[0] == "-" else value, unit)
    value = parse_value(tokens, budget)
    if unit == "percent":
        value = value.over(number(100), budget)
    return _One(value, unit)


def _brackets(tokens: Sequence[str], budget: Budget) -> _Answer | None:
    """Sets, tuples, intervals, matrices; None for an expression, also one that is in round brackets."""
    if list(tokens) == [r"\emptyset"] or list(tokens) == [r"\{", r"\}"]:
        return _Many("set", ())
    first, last = tokens[0], tokens[-1]
    if first.startswith(r"\begin{") and last == first.replace("begin", "end"):
        return _matrix(first, tokens[1:-1], budget)
    if first not in ("(", "[", r"\{") or _closing(tokens) != len(tokens) - 1:
        return None
    inner = tokens[1:-1]
    parts = _split(inner, _COMMAS)
    if first == r"\{" and last == r"\}":
        return _Many("set", tuple(_structure(part, "", budget) for part in parts))
    if first == "(" and last == ")" and len(parts) == 1:
        return _structure(inner, "", budget)
    if first == r"\{" or last == r"\}":
        raise TooHard("brackets that don't match")
    return _Many(first + last, tuple(_structure(part, "", budget) for part in parts))


def _matrix(begin: str, tokens: Sequence[str], budget: Budget) -> _Many:
    if begin not in (r"\begin{pmatrix}", r"\begin{bmatrix}", r"\begin{matrix}"):
        raise TooHard("an environment that isn't a matrix")
    rows = [row for row in _split(tokens, {"\\\\"}) if row]
    read = [tuple(_structure(cell, "", budget) for cell in _split(row, {"&"})) for row in rows]
    return _Many("matrix", tuple(_Many("row", row) for row in read))


def _relation(signs: list[str], parts: list[list[str]], unit: str, budget: Budget) -> _Answer:
    """An equation that defines one name is its right side; a chain of < and <= is read from the left."""
    if signs == ["="]:
        left = _structure(parts[0], "", budget)
        if isinstance(left, _One) and (left.value.name() is not None or _is_call(parts[0])):
            return _Many("=", (_structure(parts[1], unit, budget),), "".join(parts[0]))
    items = [_structure(part, unit, budget) for part in parts]
    if all(sign in (">", r"\ge", "=") for sign in signs) and signs != ["="] * len(signs):
        turned = {v: k for k, v in _TURNED.items()}
        signs, items = [turned.get(s, s) for s in reversed(signs)], items[::-1]
    return _Many("relation", tuple(items), " ".join(signs))


def _is_call(tokens: Sequence[str]) -> bool:
    """f(x)"""
    return len(tokens) == 4 and tokens[0].isalpha() and tokens[1] == "(" and tokens[2].isalpha() and tokens[3] == ")"


def _flat(kind: str, parts: list[_Answer]) -> tuple[_Answer, ...]:
    """Lists within lists (1, \\pm 2) are one list."""
    found: list[_Answer] = []
    for part in parts:
        found += part.items if isinstance(part, _Many) and part.kind == kind else (part,)
    return tuple(found)


def _signed(tokens: Sequence[str], turned: bool) -> list[str]:
    signs = {r"\pm": "-" if turned else "+", r"\mp": "+" if turned else "-"}
    return [signs.get(token, token) for token in tokens]


def _outer(tokens: Sequence[str]) -> list[str]:
    """Tokens outside of brackets and environments."""
    depth, found = 0, []
    for token in tokens:
        if token in _OPENING or token.startswith(r"\begin{"):
            depth += 1
        elif token in _CLOSING or token.startswith(r"\end{"):
            depth -= 1
        elif depth == 0:
            found.append(token)
    return found


def _split(tokens: Sequence[str], separators: set[str]) -> list[list[str]]:
    """Parts between separators that are outside of brackets. Empty parts beside a separator are left out."""
    depth, parts = 0, [[]]  # type: int, list[list[str]]
    for token in tokens:
        if token in _OPENING or token.startswith(r"\begin{"):
            depth += 1
        elif token in _CLOSING or token.startswith(r"\end{"):
            depth -= 1
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    if len(parts) > _MAX_ITEMS:
        raise TooHard("long list")
    return [part for part in parts if part] if separators == _COMMAS else parts


def _closing(tokens: Sequence[str]) -> int:
    """Where the bracket that opens at 0 closes; -1 when it doesn't."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            return at
    return -1


# --------------------------------------------------------------------------------------------- comparison


def _same(a: _Answer, b: _Answer, budget: Budget) -> bool:
    budget.spend(1)
    if isinstance(a, _One) and isinstance(b, _One):
        return _same_value(a, b, budget)
    for one, other in ((a, b), (b, a)):  # x = 5 is 5
        if isinstance(one, _Many) and one.kind == "=" and not (isinstance(other, _Many) and other.kind == "="):
            return _same(one.items[0], other, budget)
    if not (isinstance(a, _Many) and isinstance(b, _Many)):
        return False
    kinds = {a.kind, b.kind}
    if kinds == {"set"} or kinds == {"set", "list"}:
        return _covers(a.items, b.items, budget) and _covers(b.items, a.items, budget)
    if a.kind != b.kind or a.name != b.name or len(a.items) != len(b.items):
        return False
    if a.kind in ("list", "union"):
        return _match(a.items, b.items, budget)
    return all(_same(x, y, budget) for x, y in zip(a.items, b.items, strict=True))


def _same_value(a: _One, b: _One, budget: Budget) -> bool:
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if a.value.equals(b.value, budget):
        return True
    if "percent" not in (a.unit, b.unit) or a.unit == b.unit:
        return False
    percent, other = (a, b) if a.unit == "percent" else (b, a)
    return percent.value.times(number(Fraction(100)), budget).equals(other.value, budget)


def _covers(items: Sequence[_Answer], others: Sequence[_Answer], budget: Budget) -> bool:
    return all(any(_same(item, other, budget) for other in others) for item in items)


def _match(items: Sequence[_Answer], others: Sequence[_Answer], budget: Budget) -> bool:
    """One to one, in any order."""
    left = list(others)
    for item in items:
        found = next((i for i, other in enumerate(left) if _same(item, other, budget)), None)
        if found is None:
            return False
        del left[found]
    return True
