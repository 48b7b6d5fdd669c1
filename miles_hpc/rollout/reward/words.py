"""Answers in words: normal form, exact match, and F1 over words (SQuAD, arXiv:1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

__all__ = ["exact_match", "f1", "normalized"]

MAX_CHARS = 200_000  # a longer answer in words is none
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
#: As in HotpotQA (arXiv:1809.09600): these are right or wrong as a whole.
_WHOLE = frozenset({"yes", "no", "noanswer"})


def normalized(text: str) -> str:
    """Small letters without punctuation and articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.casefold().translate(_PUNCTUATION)).split())


def exact_match(given: str, expected: str) -> bool:
    """Whether both have one normal form, and are no empty answers."""
    if len(given) > MAX_CHARS:
        return False
    form = normalized(given)
    return bool(form) and form == normalized(expected)


def f1(given: str, expected: str) -> float:
    """Harmonic mean of precision and recall over words, counted with repetitions; in [0, 1]."""
    if len(given) > MAX_CHARS:
        return 0.0
    left, right = normalized(given), normalized(expected)
    if left != right and (left in _WHOLE or right in _WHOLE):
        return 0.0
    a, b = left.split(), right.split()
    common = sum((Counter(a) & Counter(b)).values())
    return 2 * common / (len(a) + len(b)) if common else 0.0
