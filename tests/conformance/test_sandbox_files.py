"""Files into a sandbox and out of it, with names and contents that want to break it. Real isolation of this node."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.config import SandboxConfig
from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.messages import SandboxFileEntry, SandboxGet, SandboxGot, SandboxPut, SandboxResult
from miles_hpc.rollout.sandbox_files import (
    TASK_FOLDER,
    SandboxFile,
    check_files,
    put_commands,
    put_message,
    put_request,
)
from miles_hpc.rollout.sandbox_host import SandboxHost, SandboxLimits
from tests.exploring import examples

LIMITS = SandboxLimits(memory_bytes=256 << 20, file_bytes=1 << 20, folder_bytes=4 << 20, processes=24)


@pytest.fixture(params=["unshare", "bubblewrap", "none"])
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("no bwrap here")
    return str(request.param)


Scene = Callable[[SandboxHost, Callable[..., Awaitable[str]]], Awaitable[None]]


def play(isolation: str, scene: Scene) -> None:
    async def main() -> None:
        host = SandboxHost(isolation=isolation, limits=LIMITS)  # type: ignore[arg-type]
        await host.start()

        async def sh(command: str) -> str:
            return (await host.execute("s", command, timeout_s=30, max_output_bytes=1 << 16)).output

        try:
            host.create("s", {"a": "first\n"})
            async with asyncio.timeout(120):
                await scene(host, sh)
        finally:
            await host.close()

    asyncio.run(main())


def test_any_bytes_names_and_modes_come_back(isolation: str) -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        every = bytes(range(256))
        files = {
            "bin/run me.sh": SandboxFile(b"#!/bin/bash\necho ran $0\n", 0o755),
            "every byte": SandboxFile(every),
            "empty": SandboxFile(b""),
            "-rf": SandboxFile(b"dash"),
            "quote'\"$(id)`id`": SandboxFile(b"q"),
            "ü/proc/dev/stdin": SandboxFile("é".encode()),
            "large": SandboxFile(os.urandom(300_000)),
            "secret": SandboxFile(b"s", 0o600),
        }
        assert (await host.put("s", "", files)).exit_code == 0
        for name, file in files.items():
            assert await host.get("s", name, 400_000) == file.data
        assert (
            await sh("cat a; bin/run\\ me.sh; stat -c %a secret every\\ byte") == "first\nran bin/run me.sh\n600\n644\n"
        )

    play(isolation, scene)


def test_a_folder_is_made_anew_whatever_it_was(isolation: str) -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        fresh = {"t.sh": SandboxFile(b"fresh\n"), "sub/x": SandboxFile(b"x")}
        for before in ("mkdir -p t/deep; echo old >t/old", "ln -s .. t", "ln -s nowhere t", "echo file >t", "mkfifo t"):
            await sh(f"rm -rf t; {before}")
            assert (await host.put("s", "t", fresh, replace=True)).exit_code == 0, before
            assert await sh("find t -type f | sort; cat t/t.sh") == "t/sub/x\nt/t.sh\nfresh\n"
        assert await sh("cat a") == "first\n"
        await host.put("s", "", {"only": SandboxFile(b"1")}, replace=True)
        assert await sh("ls -A") == "only\n"

    play(isolation, scene)


def test_a_link_in_a_files_place_is_not_followed(isolation: str) -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        await sh("ln -s a b; ln -s /dev/null c")
        await host.put("s", "", {"b": SandboxFile(b"new\n"), "c": SandboxFile(b"kept\n")})
        assert await sh("cat a b c") == "first\nnew\nkept\n"

    play(isolation, scene)


def test_what_runs_is_killed_first(isolation: str) -> None:
    """It could swap paths while files are written, and write into the answer of a get."""

    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        await sh("(while :; do echo forged; echo forged >verdict; done) & sleep 0.2")
        await host.put("s", "", {"verdict": SandboxFile(b"true")})
        await sh("sleep 0.2")
        assert await host.get("s", "verdict", 100) == b"true"
        await sh("(while :; do echo forged; done) & sleep 0.2")
        assert await host.get("s", "verdict", 100) == b"true"

    play(isolation, scene)


def test_only_plain_files_of_the_right_size_are_got(isolation: str) -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        await sh("ln -s a link; mkdir folder; mkfifo pipe; head -c 100 /dev/zero >hundred; : >none; chmod 0 none")
        for name in ("nothing", "link", "folder", "pipe", "a/b", "none"):
            if name != "none" or os.getuid() != 0 or isolation != "none":  # root reads anything
                assert await host.get("s", name, 1000) is None, name
        assert await host.get("s", "hundred", 100) == bytes(100)
        assert await host.get("s", "hundred", 99) is None

    play(isolation, scene)


def test_a_full_folder_is_told_by_the_exit_code() -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        files = {f"f{i}": SandboxFile(bytes(1_000_000)) for i in range(6)}
        assert (await host.put("s", "", files)).exit_code != 0
        assert (await host.put("s", "", {"x": SandboxFile(b"x")}, replace=True)).exit_code == 0
        assert (await host.put("s", "/usr/x", {"x": SandboxFile(b"x")})).exit_code != 0

    play("auto", scene)


def test_task_paths_lead_into_the_task_folder() -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        assert await sh("cat /app/a /workspace/a; ls /tests/ 2>/dev/null; cd /app; pwd") == "first\nfirst\n/app\n"
        await sh(f"mkdir {TASK_FOLDER}; ln -s /work {TASK_FOLDER}/tests; echo forged >/tests/test.sh")
        await host.put("s", TASK_FOLDER, {"tests/test.sh": SandboxFile(b"echo true")}, replace=True)
        assert (
            await sh(f"bash /tests/test.sh; cat test.sh; mkdir {TASK_FOLDER}/logs; echo 1 >/logs/r") == "true\nforged\n"
        )
        assert await host.get("s", "/logs/r", 10) == b"1\n"

    play("auto", scene)


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/x", "../x", "a/../../x", "a\nb", "a\0b", "a/", "x" * 2000])
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="expected a path inside the folder"):
        check_files("", {name: SandboxFile(b"x")}, LIMITS, isolated=True)


def test_bad_folders_sizes_modes_and_paths_are_refused(isolation: str) -> None:
    one = {"x": SandboxFile(b"x")}

    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        for folder in ("..", "/tmp/../etc", "a\nb"):
            with pytest.raises(UserError, match="expected a path without"):
                await host.put("s", folder, one)
            with pytest.raises(UserError, match="expected a path without"):
                await host.get("s", folder, 10)
        for files in (
            {"x": SandboxFile(bytes(LIMITS.file_bytes + 1))},
            {"x": SandboxFile(b"", 0o4755)},
            {f"{i}": SandboxFile(b"") for i in range(5000)},
            {f"{i}": SandboxFile(bytes(1 << 20)) for i in range(9)},
        ):
            with pytest.raises(UserError):
                await host.put("s", "", files)
        for size in (0, -1, LIMITS.file_bytes + 1):
            with pytest.raises(UserError, match="max_bytes"):
                await host.get("s", "a", size)
        if isolation == "none":
            with pytest.raises(UserError, match="isolation none"):
                await host.put("s", "/tmp", one)
            with pytest.raises(UserError, match="isolation none"):
                await host.get("s", "/etc/hostname", 100)
        with pytest.raises(UserError, match="no sandbox"):
            await host.put("t", "", one)

    play(isolation, scene)


def test_a_sandbox_that_was_made_anew_says_so(isolation: str) -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        async def anew() -> bool:
            return (await host.execute("s", "cat a", timeout_s=30, max_output_bytes=100)).anew

        assert not await anew() and not await anew()
        assert host.runner.link is not None
        host.runner.link.stop(host._sandboxes["s"].name)
        async with asyncio.timeout(30):
            while not await anew():
                await asyncio.sleep(0.02)
        assert not await anew()

    play(isolation, scene)


def test_the_limits_of_a_run_file_hold_in_the_sandbox() -> None:
    assert SandboxLimits.of(SandboxConfig()) == SandboxLimits()
    limits = SandboxLimits.of(SandboxConfig(cpu_s=3, memory_mb=200, file_mb=2, folder_mb=6, processes=20))

    async def main() -> None:
        host = SandboxHost(limits=limits)
        await host.start()
        try:
            host.create("s", {})
            command = "ulimit -t; ulimit -v; ulimit -f; df -k --output=size /work | tail -n1"
            result = await host.execute("s", command, timeout_s=30, max_output_bytes=1000)
            assert result.output.split() == ["3", f"{200 << 10}", f"{2 << 10}", f"{6 << 10}"]
            assert (await host.put("s", "", {"x": SandboxFile(bytes(2 << 20))})).exit_code == 0
            with pytest.raises(UserError, match="the limit is"):
                await host.put("s", "", {name: SandboxFile(bytes(2 << 20)) for name in "ab"})
        finally:
            await host.close()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------------ messages


def test_messages(isolation: str) -> None:
    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        files = {"x/y": SandboxFile(b"\0\1", 0o755), "z": SandboxFile(b"")}
        result = await host.handle(put_message("s", "d", files, replace=True), memoryview(b"\0\1"))
        assert isinstance(result, SandboxResult) and result.exit_code == 0
        answer = await host.handle(SandboxGet(sandbox_id="s", path="d/x/y", max_bytes=10))
        assert answer == (SandboxGot(found=True), [b"\0\1"])
        answer = await host.handle(SandboxGet(sandbox_id="s", path="d/x", max_bytes=10))
        assert answer == (SandboxGot(found=False), [b""])

    play(isolation, scene)


@pytest.mark.parametrize("sizes", [[3], [1], [-1, 3], [1, 1, 1], [2**62], [1, 1]])
def test_payloads_that_disagree_are_refused(sizes: list[int]) -> None:
    entries = tuple(SandboxFileEntry(path="same" if len(sizes) == 2 else f"{n}", n_bytes=size, mode=0o644)
                    for n, size in enumerate(sizes))  # fmt: skip
    with pytest.raises(ProtocolError):
        put_request(SandboxPut(sandbox_id="s", folder="", files=entries), b"ab")


_NAMES = st.lists(st.text("ab'$ \\\"-é", min_size=1, max_size=9), min_size=1, max_size=3).map("/".join)


@settings(max_examples=examples(30))
@given(files=st.dictionaries(_NAMES, st.builds(SandboxFile, st.binary(max_size=60_000)), max_size=40))
def test_commands_are_bounded_and_messages_round_trip(files: dict[str, SandboxFile]) -> None:
    for command in put_commands("/tmp/a b", files, replace=False):
        assert len(command.encode()) <= SandboxLimits().command_bytes
    payload = b"".join(file.data for file in files.values())
    assert put_request(put_message("s", "d", files, replace=False), payload) == files


def test_nothing_is_written_outside_without_isolation(tmp_path: Path) -> None:
    """What a sandbox can't reach by itself it can't be made to reach by a link."""

    async def scene(host: SandboxHost, sh: Callable[..., Awaitable[str]]) -> None:
        await sh(f"ln -s {tmp_path} out")
        await host.put("s", "out/here", {"x": SandboxFile(b"x")})
        assert not list(tmp_path.iterdir())

    play("auto", scene)
