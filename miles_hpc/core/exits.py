"""Exit codes of our processes: what a parent needs to know of a child's end."""

from __future__ import annotations

__all__ = ["DONE", "FAILED", "FENCED", "NEXT_ALLOCATION", "NO_STORAGE", "UNREADABLE", "USER_ERROR"]

#: The run is complete.
DONE = 0
#: Something broke; the parent may start it again, a bounded number of times.
FAILED = 1
#: Bad input: one line was printed, nothing was written. argparse uses the same code.
USER_ERROR = 2
#: What an earlier process of ours stored can't be read: move it aside, or mend it.
UNREADABLE = 3
#: Storage takes nothing, or can't be reached; waiting may help.
NO_STORAGE = 4
#: State is saved; the run goes on in the next allocation.
NEXT_ALLOCATION = 10
#: A newer term or attempt exists; nobody needs to start this again.
FENCED = 75
