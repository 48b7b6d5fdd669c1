"""What a node must allow an ordinary user before sandboxes can be isolated on it, and what of that is missing.

| setting of the kernel (sysctl) | needed | where it is found |
|---|---|---|
| user.max_user_namespaces | 2 per sandbox (bubblewrap: 3) | everywhere; 0 by default on RHEL 7 |
| user.max_net_namespaces, .max_pid_, .max_mnt_, .max_ipc_ | 1 per sandbox, and one more | everywhere |
| user.max_uts_namespaces | 1 | everywhere |
| kernel.unprivileged_userns_clone | 1 | Debian's and Arch's kernels |
| kernel.apparmor_restrict_unprivileged_userns | 0, or an AppArmor profile for the programs | Ubuntu 23.10 and later |

Sources: namespaces(7), user_namespaces(7); Ubuntu's release notes of 23.10; Debian's kernel patch of that name.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["missing"]

_MIN = {
    "user.max_user_namespaces": 3,
    "user.max_net_namespaces": 2,
    "user.max_pid_namespaces": 2,
    "user.max_mnt_namespaces": 2,
    "user.max_ipc_namespaces": 2,
    "user.max_uts_namespaces": 1,
    "kernel.unprivileged_userns_clone": 1,
}
_MAX = {"kernel.apparmor_restrict_unprivileged_userns": 0}


def missing(settings: Path = Path("/proc/sys")) -> tuple[str, ...]:
    """`NAME = VALUE: expected ...` for each setting that forbids sandboxes; one that isn't there forbids nothing.

    Nothing missing is no promise: a seccomp filter or a security module around this process may forbid them as well.
    """
    found = []
    for name in (*_MIN, *_MAX):
        value = _read(settings / name.replace(".", "/"))
        if value is None:
            continue
        if value < _MIN.get(name, value):
            found.append(f"{name} = {value}: expected {_MIN[name]} or more")
        if value > _MAX.get(name, value):
            found.append(f"{name} = {value}: expected {_MAX[name]}, or an AppArmor profile that allows it")
    return tuple(found)


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
