"""Which bound of its sandbox a command met: pure, from what the host saw itself, PID 1 told and the launcher counted.

| limit | told when | can't be told when |
|---|---|---|
| output | it wrote more than the host reads and drops, and was killed if it still ran | |
| processes | as many tasks as may be were there when it failed or its time was over | they had ended by then |
| folder | /work or /tmp had no room or no file left when it failed or its time was over | what filled it is gone |
| cpu, file | it ended by SIGXCPU, SIGXFSZ | a part of it did and it went on; it handles the signal |
| time | the host had it killed, and none of the above | |

The first that holds counts; `timed_out` and `truncated` of the result hold beside it. A command may end itself with the
exit codes of these signals: that is its own lie about itself, and no more than its output. Never told: memory. A
process that asks for more than it may have gets ENOMEM and goes on as it likes; its words are all there is. Looking
costs a question to the launcher, so commands that end with exit code 0 aren't looked at.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from miles_hpc.core.types import SandboxLimit

__all__ = ["Use", "limit_met"]


@dataclass(frozen=True, slots=True)
class Use:
    """What a sandbox has used of its bounds at a moment."""

    tasks: int = 0  # processes and their threads; 0: unknown
    full: bool = False  # a folder is

    @classmethod
    def parse(cls, answer: str) -> Use:
        """Of the launcher's answer `looked TASKS FULL`; unknown from anything else."""
        match answer.split(" "):
            case ["looked", tasks, full] if tasks.isdecimal() and full in ("0", "1"):
                return cls(int(tasks), full == "1")
        return cls()


def limit_met(exit_code: int, use: Use, *, processes: int, timed_out: bool, overflow: bool) -> SandboxLimit:
    """By the table above. `processes` is the sandbox's bound, 0 where none is set; `use` is of the command's end."""
    if overflow:
        return SandboxLimit.OUTPUT
    if 0 < processes <= use.tasks:
        return SandboxLimit.PROCESSES
    if use.full:
        return SandboxLimit.FOLDER
    if exit_code == 128 + signal.SIGXCPU:
        return SandboxLimit.CPU
    if exit_code == 128 + signal.SIGXFSZ:
        return SandboxLimit.FILE
    return SandboxLimit.TIME if timed_out else SandboxLimit.NONE
