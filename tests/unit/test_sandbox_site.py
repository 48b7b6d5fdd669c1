"""What a node's settings say about sandboxes; the real refusal is in tests/conformance/test_sandbox_user.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_hpc.rollout.sandbox_site import missing


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, []),
        ({"user/max_user_namespaces": "63500\n", "kernel/unprivileged_userns_clone": "1\n"}, []),
        ({"user/max_user_namespaces": "0\n"}, ["user.max_user_namespaces = 0: expected 3 or more"]),
        ({"user/max_net_namespaces": "1\n"}, ["user.max_net_namespaces = 1: expected 2 or more"]),
        ({"kernel/unprivileged_userns_clone": "0\n"}, ["kernel.unprivileged_userns_clone = 0: expected 1 or more"]),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1\n", "user/max_uts_namespaces": "0\n"},
            [
                "user.max_uts_namespaces = 0: expected 1 or more",
                "kernel.apparmor_restrict_unprivileged_userns = 1: expected 0, or an AppArmor profile that allows it",
            ],
        ),
        ({"kernel/apparmor_restrict_unprivileged_userns": "0\n"}, []),
        ({"user/max_user_namespaces": "many\n"}, []),
    ],
)
def test_what_is_missing(tmp_path: Path, settings: dict[str, str], names: list[str]) -> None:
    for name, text in settings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert list(missing(tmp_path)) == names
