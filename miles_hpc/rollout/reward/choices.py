"""Multiple choice: which letter a response gives, and which one is right."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.reward.answers import last_boxed
from miles_hpc.rollout.reward.words import normalized

__all__ = ["chosen_letter", "chosen_text", "letters_of", "right_letter"]

_TAIL_CHARS = 4000  # where a final answer is looked for
_OPEN = r"[\s*_$:(\[{]{0,8}(?:\\(?:text|textbf|mathrm)\s{0,3}\{)?[\s(*]{0,4}"
_BOXED = re.compile(_OPEN + r"([A-Za-z])(?:[\s)}\].*$]{0,8}\Z|\s{0,2}[).:]\s)")
_SAID = re.compile(
    r"\b(?:answer|option|choice)\b\s{0,3}(?:is\b(?!\s+not\b)|:|=)?" + _OPEN + r"([A-Za-z])(?![A-Za-z'])", re.IGNORECASE
)
_MARKED = re.compile(r"\(([A-Z])\)|\*\*\(?([A-Z])\)?[.:]?\*\*")
_ALONE = re.compile(r"(?<![A-Za-z'\\-])([A-Z])(?![A-Za-z'-])")
_CLOSES = re.compile(r"[ )}\]*$]{0,8}(?:[.,;:!]|\n|\Z)")


def letters_of(metadata: Mapping[str, Any]) -> list[str]:
    """The valid letters: `valid_letters`, one for each of `choices`, or A to J."""
    given = metadata.get("valid_letters")
    if given:
        return [str(letter).strip().upper() for letter in given]
    choices = _choices(metadata)
    return list(string.ascii_uppercase[: len(choices) or 10])


def right_letter(label: str, metadata: Mapping[str, Any]) -> str:
    """From `correct_letter`, or the label: a letter, a number counted from 0, or the text of one of `choices`.

    Raises UserError when neither says which.
    """
    letters = letters_of(metadata)
    for text in (str(metadata.get("correct_letter") or ""), label):
        letter = text.strip().strip("().").upper()
        if letter in letters:
            return letter
    if label.strip().isdecimal() and len(label) < 4 and int(label) < len(letters):
        return letters[int(label)]
    wanted = normalized(label)
    for letter, choice in zip(letters, _choices(metadata), strict=False):
        if wanted and normalized(str(choice)) == wanted:
            return letter
    raise UserError(
        f"multiple choice: label {label[:80]!r}: expected one of {', '.join(letters)}, a number from 0, or the text of "
        "one of metadata's choices; set correct_letter in the metadata"
    )


def chosen_letter(response: str, letters: Sequence[str]) -> str | None:
    """The letter that a response ends on: boxed, else said, else marked as (B) or **B**, else the last one alone.

    Of several the last counts. "A", "I" and small letters, which are words, too, count only before the end of a
    sentence, of a line or of the text.
    """
    boxed = last_boxed(response)
    if boxed is not None:
        match = _BOXED.match(boxed)
        return match[1].upper() if match is not None and match[1].upper() in letters else None
    tail = response[-_TAIL_CHARS:]
    for pattern in (_SAID, _MARKED, _ALONE):
        for match in reversed(list(pattern.finditer(tail))):
            letter = next(group for group in match.groups() if group)
            doubtful = pattern is not _MARKED and (letter in ("A", "I") or letter.islower())
            if letter.upper() in letters and (not doubtful or _CLOSES.match(tail, match.end())):
                return letter.upper()
    return None


def chosen_text(response: str, metadata: Mapping[str, Any]) -> str | None:
    """The letter of the choice whose text is the boxed answer, or all of the response; None when there is none."""
    given = normalized(last_boxed(response) or response[-_TAIL_CHARS:])
    for letter, choice in zip(letters_of(metadata), _choices(metadata), strict=False):
        if given and normalized(str(choice)) == given:
            return letter
    return None


def _choices(metadata: Mapping[str, Any]) -> list[Any]:
    given = metadata.get("choices") or ()
    return list(given.values()) if isinstance(given, Mapping) else list(given)
