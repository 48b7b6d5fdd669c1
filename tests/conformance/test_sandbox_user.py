"""Sandboxes as an ordinary user makes them: the same suites without root, and nodes that don't allow what is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SUITES = ("test_sandbox.py", "test_sandbox_files.py", "test_sandbox_escapes.py")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
# setpriv starts an interpreter with rights of root, which the interpreter lacks when it starts itself again.
NEEDED = f"""
import os, sys, hypothesis, msgspec, pytest
sys.exit(sys.version_info[:2] != {sys.version_info[:2]} or not os.access(sys.executable, os.X_OK))
"""


def environ(folder: Path) -> dict[str, str]:
    """Of a user who finds the project, and this interpreter's packages, and has a folder to write to."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{REPOSITORY}:{sysconfig.get_path('purelib')}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder),
        "HOME": str(folder),
    }


def an_interpreter(user: tuple[str, ...], folder: Path) -> str:
    for python in (sys.executable, "/usr/bin/python3"):
        check = [*user, python, "-c", NEEDED]
        if subprocess.run(check, env=environ(folder), cwd="/", capture_output=True, timeout=60).returncode == 0:
            return python
    pytest.skip(f"no Python {sys.version_info[0]}.{sys.version_info[1]} that user nobody may run with these packages")


@pytest.mark.slow
@pytest.mark.netns  # with the other tests that only root can start
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("namespace", "suites"),
    [
        pytest.param((), SUITES, id="ordinary-user"),
        pytest.param(("unshare", "--user", "--map-root-user"), SUITES[-1:], id="root-of-a-namespace"),
    ],
)
def test_the_suites_hold_without_root(tmp_path: Path, namespace: tuple[str, ...], suites: tuple[str, ...]) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user; the suites themselves ran as an ordinary one")
    python = an_interpreter(NOBODY, tmp_path)
    files = [f"tests/conformance/{suite}" for suite in suites]
    ran = subprocess.run(
        [*NOBODY, *namespace, python, "-m", "pytest", "-q", "-x", *files],
        env=environ(Path("/tmp")),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout.splitlines()[-1]


START = """
import asyncio, sys
from miles_hpc.core.errors import UserError
from miles_hpc.rollout.sandbox_host import SandboxHost
async def main():
    host = SandboxHost()
    try:
        await host.start()
    except UserError as error:
        print(error)
    else:
        print("started", host.isolation)
    finally:
        await host.close()
asyncio.run(main())
"""


def test_root_of_a_namespace_that_knows_nobody_else(tmp_path: Path) -> None:
    """As in a container without further user ids."""
    become = (*NOBODY,) if os.getuid() == 0 else ()
    python = an_interpreter(become, tmp_path)
    user = (*become, "unshare", "--user", "--map-root-user")
    if subprocess.run([*user, "true"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("no user namespaces here")
    ran = subprocess.run(
        [*user, python, "-c", START], env=environ(tmp_path), cwd="/", capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (0, "started unshare\n"), ran.stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("max_user_namespaces 0", "user.max_user_namespaces = 0: expected 3 or more"),
        ("max_net_namespaces 0", "user.max_net_namespaces = 0: expected 2 or more"),
        ("max_net_namespaces 1", "user.max_net_namespaces = 1: expected 2 or more"),
        ("max_user_namespaces 9", "started unshare"),
    ],
)
def test_a_node_that_forbids_namespaces_is_refused_by_name(tmp_path: Path, setting: str, told: str) -> None:
    """In a user namespace of the test's own, where these settings are its own as well."""
    name, value = setting.split()
    become = (*NOBODY,) if os.getuid() == 0 else ()
    script = f'echo {value} >/proc/sys/user/{name} && exec setpriv --inh-caps=-all --ambient-caps=-all "$@"'
    user = (
        *become,
        "unshare",
        "--user",
        "--map-user=1234",
        "--map-group=1234",
        "--keep-caps",
        "/bin/sh",
        "-c",
        script,
        "sh",
    )
    python = an_interpreter(become, tmp_path)
    if subprocess.run([*user, "true"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("no user namespace with capabilities here")
    ran = subprocess.run(
        [*user, python, "-c", START], env=environ(tmp_path), cwd="/", capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert told in ran.stdout and ran.stdout.count("\n") == 1
