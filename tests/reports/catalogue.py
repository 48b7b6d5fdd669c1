"""What a public report of a failure is to this project, and the way from its number to the tests that answer it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """One report of somebody else's failure.

    `tests` reproduce its input, or its situation, and check the outcome that is right here: "tests/....py::test_x", or
    with one case of a table, "tests/....py::test_x[case]". `not_ours` says which part is other software's and why;
    `not_yet` which part this project doesn't answer, in the words of a person who wonders whether it does.
    """

    number: str  # under which the report was collected
    source: str  # where it was told, as owner/repository#number or as a site's name; several are one kind of fault
    fault: str
    tests: tuple[str, ...] = ()
    not_ours: str = ""
    not_yet: str = ""
