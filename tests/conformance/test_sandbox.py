"""What sandboxes promise, tried by commands that want to break it. Runs the real isolation of this node."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from miles_hpc.core.errors import ProtocolError, UserError
from miles_hpc.core.messages import (
    SandboxCreate,
    SandboxDestroy,
    SandboxExec,
    SandboxHostStatus,
    SandboxResult,
    SandboxStatus,
    Shutdown,
)
from miles_hpc.rollout.sandbox_host import SandboxError, SandboxHost, SandboxLimits

FILES = {"a": "11\n12\n", "b": "13\n"}
LIMITS = SandboxLimits(memory_bytes=256 << 20, file_bytes=1 << 20, folder_bytes=4 << 20, processes=24)


class Shell:
    """One host, one sandbox, short to call."""

    def __init__(self, host: SandboxHost) -> None:
        self.host = host

    async def __call__(
        self, command: str, *, sandbox: str = "s", timeout_s: float = 30.0, max_output_bytes: int = 4096
    ) -> SandboxResult:
        return await self.host.execute(sandbox, command, timeout_s=timeout_s, max_output_bytes=max_output_bytes)


#: Isolation `none` promises only what these try.
FOR_ALL = (
    "test_nested_files",
    "test_file_names",
    "test_messages",
    "test_time_limit",
    "test_endless",
    "test_binary",
    "test_nul",
    "test_many",
    "test_more",
    "test_idle",
    "test_close",
    "test_destroy_interrupts",
    "test_a_cancelled",
    "test_a_lost_launcher",
)


@pytest.fixture(params=["unshare", "bubblewrap", "none"])
def isolation(request: pytest.FixtureRequest) -> str:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("no bwrap here")
    if request.param == "none" and not request.node.name.startswith(FOR_ALL):
        pytest.skip("not promised without isolation")
    return str(request.param)


Play = Callable[[Callable[[Shell], Awaitable[None]]], None]


@pytest.fixture
def play(isolation: str) -> Play:
    def run(scene: Callable[[Shell], Awaitable[None]]) -> None:
        async def main() -> None:
            host = SandboxHost(isolation=isolation, limits=LIMITS)  # type: ignore[arg-type]
            await host.start()
            try:
                host.create("s", FILES)
                async with asyncio.timeout(120):
                    await scene(Shell(host))
            finally:
                await host.close()

        asyncio.run(main())

    return run


# ------------------------------------------------------------------------------------------------ ordinary use


def test_files_output_status_and_state(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        result = await sh("cat *; pwd")
        assert (result.exit_code, result.output) == (0, "11\n12\n13\n/work\n")
        assert not result.truncated and not result.timed_out and result.duration_s > 0
        assert (await sh("echo out; echo err >&2; exit 3")).output == "out\nerr\n"
        assert (await sh("exit 3")).exit_code == 3
        assert (await sh("nosuchcommand")).exit_code == 127
        assert (await sh("echo new >c; mkdir d; echo x >d/e")).exit_code == 0
        assert (await sh("ls; cat d/e")).output == "a\nb\nc\nd\nx\n"
        assert (await sh("sort -r a | head -n1")).output == "12\n"
        assert (await sh("echo to >/dev/stderr; cat <(echo sub)")).output == "to\nsub\n"
        assert (await sh("for i in 1 2; do\necho $i\ndone")).output == "1\n2\n"
        assert (await sh("wc -c", timeout_s=20)).output == "0\n"  # standard input is empty

    play(scene)


def test_nested_files_and_awkward_contents(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        files = {"x/y/z": "deep", "quote'\"$(id)": "a\\b\n\n", "-n": "dash", "empty": "", "ü": "é\n"}
        sh.host.create("f", files)
        listed = await sh("find . -type f | wc -l; cat x/y/z; cat ./-n; wc -c <empty; cat ü", sandbox="f")
        assert listed.output == "5\ndeepdash0\né\n"
        result = await sh('cat "quote\'\\"\\$(id)"', sandbox="f")
        assert result.output == "a\\b\n\n"

    play(scene)


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a\nb"])
def test_file_names_that_leave_the_folder_are_refused(play: Play, name: str) -> None:
    async def scene(sh: Shell) -> None:
        with pytest.raises(UserError):
            sh.host.create("bad", {name: "x"})
        with pytest.raises(UserError):
            sh.host.create("bad", {"x": "nul\0"})

    play(scene)


def test_large_files_go_in_and_too_large_ones_are_an_error(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        text = "0123456789abcde\n" * 40_000  # more than a socket buffer holds
        sh.host.create("big", {"big": text, "more": text})
        assert (await sh("cat big more | wc -c", sandbox="big")).output == f"{2 * len(text)}\n"
        sh.host.create("huge", {f"f{i}": "x" * 1_000_000 for i in range(6)})  # more than the folder holds
        with pytest.raises(SandboxError, match="don't fit"):
            await sh("ls", sandbox="huge")

    play(scene)


def test_messages(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        handle = sh.host.handle
        assert await handle(SandboxCreate(sandbox_id="m", files={"q": "1\n"})) is None
        execute = SandboxExec(sandbox_id="m", command="cat q", timeout_s=20, max_output_bytes=100)
        result = await handle(execute)
        assert isinstance(result, SandboxResult) and result.output == "1\n"
        assert await handle(SandboxDestroy(sandbox_id="m")) is None
        assert await handle(SandboxDestroy(sandbox_id="m")) is None
        with pytest.raises(UserError, match="no sandbox"):
            await handle(execute)
        status = await handle(SandboxStatus())
        assert isinstance(status, SandboxHostStatus)
        assert status.live == 1 and status.executed >= 2 and status.isolation == sh.host.isolation
        with pytest.raises(ProtocolError):
            await handle(Shutdown(reason="x"))

    play(scene)


# ------------------------------------------------------------------------------------------------ reaching out


@pytest.mark.parametrize(
    "command",
    [
        "cat /etc/shadow",
        "cat /etc/passwd /etc/hostname",
        "ls /root",
        "ls /home/*",
        "ls /var/log",
        "cat /proc/1/environ | grep .",
        "cat /proc/1/root/etc/shadow",
        "ls /sys/class",
    ],
)
def test_the_node_can_not_be_read(play: Play, command: str) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh(command)).exit_code != 0

    play(scene)


def test_no_path_of_the_project_is_visible(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        here = Path(__file__).resolve()
        assert (await sh(f"cat {here}")).exit_code != 0
        assert (await sh("cat /proc/self/mountinfo")).output.count(str(here.parents[2])) == 0

    play(scene)


@pytest.mark.parametrize(
    "target", ["/x", "/usr/x", "/bin/x", "/etc/x", "/run/x", "/dev/x", "/proc/x", "/lib/x", "/run/shell"]
)
def test_nothing_outside_can_be_written(play: Play, target: str) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh(f"echo x >{target}")).exit_code != 0
        assert (await sh(f"chmod 777 {target}; rm -f {target}; test -w {target}")).exit_code != 0
        assert (await sh("echo x >/tmp/x && cat /tmp/x")).output == "x\n"  # its own

    play(scene)


def test_no_network(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        interfaces = await sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")
        assert interfaces.output in ("lo\n", "")
        for address in ("127.0.0.1", "1.1.1.1"):
            assert (await sh(f"timeout 5 bash -c 'echo x >/dev/tcp/{address}/22'")).exit_code != 0

    play(scene)


def test_the_environment_of_the_host_is_invisible(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_TEST_SECRET", "hidden-value")

    async def scene(sh: Shell) -> None:
        result = await sh("env; set; cat /proc/*/environ", max_output_bytes=1 << 16)
        assert "hidden-value" not in result.output and "MILES_TEST" not in result.output
        names = {line.partition("=")[0] for line in (await sh("env")).output.splitlines()}
        assert names <= {"PATH", "HOME", "LC_ALL", "TERM", "PWD", "SHLVL", "OLDPWD", "_"}

    play(scene)


def test_no_capabilities_and_no_way_to_new_ones(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        lines = (await sh("grep -E 'Cap(Eff|Prm|Amb|Inh)|NoNewPrivs|^Uid' /proc/self/status")).output
        assert "NoNewPrivs:\t1" in lines and "Uid:\t0" not in lines
        assert all(set(line.split()[1]) == {"0"} for line in lines.splitlines() if line.startswith("Cap"))
        assert (await sh("mount -t tmpfs x /tmp")).exit_code != 0
        assert (await sh("mount -o remount,rw /usr; chroot / id")).exit_code != 0
        for limit in ("-u", "-v", "-f", "-n"):
            assert (await sh(f"ulimit {limit} unlimited")).exit_code != 0

    play(scene)


def test_sandboxes_do_not_see_each_other(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        sh.host.create("other", {"secret": "of the other\n"})
        await sh("sleep 60 & echo mine >/tmp/t", sandbox="other")
        assert (await sh("ls; ls /tmp")).output == "a\nb\n"
        assert (await sh("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep [6]0'")).output == "0\n"
        assert (await sh("cat /proc/[0-9]*/root/work/secret")).exit_code != 0
        await sh("kill -9 -1")
        assert (await sh("cat secret /tmp/t", sandbox="other")).output == "of the other\nmine\n"

    play(scene)


# ------------------------------------------------------------------------------------------------ too much of it


def test_time_limit_spares_the_next_command(play: Play) -> None:
    """A command that ends by itself just then: what its limit has set off must be over before the next begins."""

    async def scene(sh: Shell) -> None:
        link = sh.host.runner.link
        assert link is not None
        clear = link.clear

        def late(name: str) -> asyncio.Future[str]:
            async def later() -> str:
                await asyncio.sleep(0.3)
                return await clear(name)

            return asyncio.ensure_future(later())

        link.clear = late  # type: ignore[method-assign]
        assert (await sh("sleep 0.6", timeout_s=0.5)).timed_out
        assert (await sh("sleep 0.5; echo alive")).output == "alive\n"

    play(scene)


def test_time_limit_kills_and_keeps_the_files(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        begin = time.monotonic()
        result = await sh("echo before; echo kept >c; sleep 100", timeout_s=0.5)
        assert result.timed_out and result.exit_code == 137 and result.output == "before\n"
        assert time.monotonic() - begin < 50
        assert (await sh("cat c a")).output == "kept\n11\n12\n"

    play(scene)


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM INT HUP; sleep 100",
        "setsid sleep 100 & setsid nohup sleep 100 & wait",
        "kill -STOP $BASHPID",
        "while :; do :; done",
        "(exec sleep 100 >/dev/null 2>&1 </dev/null)",
    ],
)
def test_nothing_escapes_the_time_limit(play: Play, command: str) -> None:
    async def scene(sh: Shell) -> None:
        result = await sh(command, timeout_s=0.5)
        assert result.timed_out and result.exit_code == 137
        async with asyncio.timeout(30):  # what was killed is gone when PID 1 has taken note
            while (await sh("cat /proc/[0-9]*/comm 2>/dev/null | grep -c sleep")).output != "0\n":
                pass

    play(scene)


def test_endless_output_is_cut_and_killed(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        result = await sh("seq 1000", max_output_bytes=10)
        assert result.truncated and result.output == "1\n2\n3\n4\n5\n" and result.exit_code == 0
        result = await sh("echo 123456789", max_output_bytes=10)
        assert not result.truncated and result.output == "123456789\n"
        result = await sh("yes", max_output_bytes=100)  # last: without isolation it may still write for a moment
        assert result.truncated and result.output == "y\n" * 50 and result.exit_code == 137 and not result.timed_out

    play(scene)


def test_fork_bomb_is_bounded(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        result = await sh("bomb() { bomb | bomb & }; bomb; sleep 100", timeout_s=1.5)
        assert result.exit_code != 0  # killed, or out of processes itself
        for _ in range(20):  # the dead count until PID 1 has taken note
            result = await sh("ls /proc | grep -c '^[0-9]'; echo alive")
            if result.output.endswith("alive\n") and "fork" not in result.output:
                break
        assert int(result.output.split()[0]) <= LIMITS.processes + 1

    play(scene)


def test_process_limit_counts_per_sandbox(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        names = [f"p{i}" for i in range(6)]
        for name in names:
            sh.host.create(name, {})
        command = "for i in $(seq 12); do sleep 30 & done; echo ok"
        results = await asyncio.gather(*(sh(command, sandbox=name) for name in names))
        assert [r.output for r in results] == ["ok\n"] * 6  # 72 together, more than one may have

    play(scene)


def test_memory_file_and_folder_limits(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        # A line without end has to be kept in memory by sort.
        result = await sh("tr '\\0' x </dev/zero | sort -S 2G | wc -c", timeout_s=20)
        assert "memory" in result.output or result.exit_code != 0 or result.output.strip() == "0"
        assert (await sh("head -c 2000000 /dev/zero >big")).exit_code != 0
        assert int((await sh("wc -c <big")).output) <= LIMITS.file_bytes
        await sh("for i in $(seq 40); do head -c 1000000 /dev/zero >f$i; done")
        assert int((await sh("cat f* | wc -c")).output) <= LIMITS.folder_bytes
        assert (await sh("rm -f f* big; ls")).output == "a\nb\n"

    play(scene)


# ------------------------------------------------------------------------------------------------ telling lies


@pytest.mark.parametrize(
    "command",
    [
        "echo 0 >&3",
        "printf '0\\n0\\n' >&3; false",
        "for i in {3..127}; do echo 0 >&$i; done; false",
        "for f in /proc/1/fd/*; do echo 0 >$f; done; false",
        "for f in /proc/$PPID/fd/* /proc/self/fd/*; do echo 0 >$f; done 2>/dev/null; false",
        "exec 1>&- 2>&-; exit 9",
        "printf '0\\n'; printf '\\0\\0\\0'; head -c 300 /dev/urandom; exit 5",
        "exec false",
        "trap 'exit 0' EXIT; kill -9 $BASHPID",
        "set -e; false; true",
        "eval '('",
        "exit 256000; }; echo 0 >&3; {",
    ],
)
def test_status_can_not_be_forged(play: Play, command: str) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh(command)).exit_code != 0
        after = await sh("cat b; exit 4")
        assert (after.exit_code, after.output) == (4, "13\n")

    play(scene)


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 $$",
        "kill -9 1",
        "kill -STOP 1; kill -TERM 1; kill -INT 1; kill -HUP 1; kill -QUIT 1; kill -PIPE 1; kill -USR1 1; kill -CHLD 1",
        "kill -9 -1",
        "exit",
        "exec true",
        "exec 0<&- 1>&- 2>&- 3>&- 4>&-",
        "cd /; PATH=; unset HOME; readonly command status name text; set -u; shopt -s extglob",
        "eval() { :; }; echo() { :; }; read() { :; }; exit() { :; }",
        "trap '' INT TERM; ulimit -n 5",
        "rm -rf /work/* /tmp/*",
        "kill -9 $PPID",
    ],
)
def test_the_shell_behind_goes_on(play: Play, command: str) -> None:
    async def scene(sh: Shell) -> None:
        await sh(command)
        after = await sh("echo fine; pwd; exit 7")
        assert (after.exit_code, after.output) == (7, "fine\n/work\n")

    play(scene)


def test_pid_1_can_not_be_traced_or_opened(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        for path in ("fd", "fd/3", "mem", "environ", "maps", "root/", "cwd/", "exe"):
            assert (await sh(f"ls /proc/1/{path} && cat /proc/1/{path} >/dev/null")).exit_code != 0, path
        assert (await sh("cat /run/shell")).exit_code != 0

    play(scene)


def test_binary_output_is_decoded_somehow(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        result = await sh("printf 'a\\0b\\377c'")
        assert result.output == "a\0b\ufffdc" and result.exit_code == 0

    play(scene)


def test_nul_and_overlong_commands_are_answered(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh("echo a\0b")).exit_code == 2
        assert (await sh("#" * (LIMITS.command_bytes + 1))).exit_code == 2
        assert (await sh("echo " + "x" * 50_000, max_output_bytes=60_000)).output == "x" * 50_000 + "\n"
        assert (await sh("echo \udce9")).exit_code == 0  # a lone surrogate, as text from bytes may hold

    play(scene)


def test_late_words_of_the_background_are_not_the_next_commands(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh("(sleep 0.3; echo late) & echo now")).output == "now\n"
        await asyncio.sleep(1.0)
        assert (await sh("echo next")).output == "next\n"

    play(scene)


# ------------------------------------------------------------------------------------------------ the end


def _count(marker: str) -> int:
    """Processes of this node whose command line has the marker."""
    n = 0
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            try:
                n += marker in Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(
                    "utf-8", "replace"
                )
            except OSError:
                pass
    return n


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return children + [d for c in children for d in _descendants(c)]


async def _until_gone(marker: str) -> None:
    async with asyncio.timeout(30):
        while _count(marker):
            await asyncio.sleep(0.02)


def test_destroy_ends_what_was_left_behind(play: Play) -> None:
    marker = f"sleep 98{os.getpid()}"

    async def scene(sh: Shell) -> None:
        await sh(f"{marker} & setsid nohup {marker} >/dev/null 2>&1 & disown -a; echo")
        async with asyncio.timeout(30):
            while _count(marker) < 2:
                await asyncio.sleep(0.02)
        sh.host.destroy("s")
        await _until_gone(marker)

    play(scene)


def test_destroy_interrupts_a_running_command(play: Play) -> None:
    marker = f"sleep 97{os.getpid()}"

    async def scene(sh: Shell) -> None:
        running = asyncio.create_task(sh(marker))
        while not _count(marker):
            await asyncio.sleep(0.02)
        sh.host.destroy("s")
        result = await running
        assert result.exit_code == 137
        await _until_gone(marker)
        assert sh.host.runner.link is not None
        async with asyncio.timeout(30):  # and nothing is started in its place
            while len(_descendants(sh.host.runner.link.process.pid)) > 1:
                await asyncio.sleep(0.02)

    play(scene)


ORPHAN = """
import os, socket, sys, time
from miles_hpc.rollout.sandbox_births import NamespaceBirths
from miles_hpc.rollout.sandbox_launcher import serve
host, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if not os.fork():
    time.sleep(1)
    os._exit(0)
host.send(b"stop s")
serve(channel, NamespaceBirths("", "bwrap", "", b""))
"""


def test_a_process_that_outlives_its_bwrap_is_reaped() -> None:
    """A stop kills both; when bwrap dies first, the launcher's namespace has a child that no sandbox stands for."""
    launcher = subprocess.Popen([sys.executable, "-c", ORPHAN])
    try:
        end = time.monotonic() + 20  # the launcher looks every 30 s when it has no children
        while not _descendants(launcher.pid):
            assert launcher.poll() is None
        while _descendants(launcher.pid):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        launcher.kill()
        launcher.wait()


def test_close_ends_everything(isolation: str) -> None:
    marker = f"sleep 96{os.getpid()}"

    async def main() -> None:
        host = SandboxHost(isolation=isolation)  # type: ignore[arg-type]
        await host.start()
        host.create("s", {})
        await host.execute("s", f"{marker} &", timeout_s=20, max_output_bytes=10)
        async with asyncio.timeout(30):
            while not _count(marker):
                await asyncio.sleep(0.02)
        await host.close()
        await _until_gone(marker)
        await host.close()

    asyncio.run(main())


def test_idle_sandboxes_are_swept(isolation: str) -> None:
    async def main() -> None:
        host = SandboxHost(isolation=isolation, idle_limit_s=0.5)  # type: ignore[arg-type]
        await host.start()
        try:
            host.create("s", {})
            async with asyncio.timeout(30):
                while host.status().live:
                    await asyncio.sleep(0.05)
        finally:
            await host.close()

    asyncio.run(main())


def test_more_at_once_than_the_launchers_queue_holds(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        names = [f"q{i}" for i in range(300)]
        for name in names:
            sh.host.create(name, {"n": name})
        results = await asyncio.gather(*(sh("cat n", sandbox=name, timeout_s=100) for name in names[::10]))
        assert [r.output for r in results] == names[::10]

    play(scene)


def test_many_sandboxes_at_once(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        async def episode(i: int) -> str:
            name = f"e{i}"
            sh.host.create(name, {"n": f"{i}\n"})
            output = (await sh("cat n", sandbox=name)).output + (await sh("wc -l <n", sandbox=name)).output
            sh.host.destroy(name)
            return output

        outputs = await asyncio.gather(*(episode(i) for i in range(40)))
        assert outputs == [f"{i}\n1\n" for i in range(40)]
        assert sh.host.status().live == 1

    play(scene)


def test_commands_inherit_three_descriptors(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh("ls /proc/self/fd | wc -l")).output == "4\n"  # and the one that ls has opened

    play(scene)


def test_a_host_with_thousands_of_descriptors(play: Play) -> None:
    """Descriptors above 1023, as the host of many connections has, are out of select(2)'s range."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]

    async def scene(sh: Shell) -> None:
        assert held[-1] > 1023
        assert (await sh("cat b; exit 3")).exit_code == 3

    try:
        play(scene)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_auto_takes_the_first_that_works_and_says_why_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        host = SandboxHost()
        await host.start()
        assert host.status().isolation == "unshare"
        await host.close()
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match=r"can't isolate.*bubblewrap: no bwrap.*'none'"):
            await SandboxHost(isolation="bubblewrap").start()

    asyncio.run(main())


def test_a_cancelled_command_leaves_a_usable_sandbox(play: Play) -> None:
    marker = f"sleep 95{os.getpid()}"

    async def scene(sh: Shell) -> None:
        running = asyncio.create_task(sh(marker))
        while not _count(marker):
            await asyncio.sleep(0.02)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (await sh("cat b; exit 3")).exit_code == 3
        await _until_gone(marker)

    play(scene)


def test_a_lost_launcher_is_replaced(play: Play) -> None:
    async def scene(sh: Shell) -> None:
        assert (await sh("cat b")).output == "13\n"
        link = sh.host.runner.link
        assert link is not None
        link.process.kill()
        async with asyncio.timeout(60):
            while sh.host.runner.link is link:
                await asyncio.sleep(0.02)
        assert (await sh("cat b")).output == "13\n"
        sh.host.create("t", {"x": "y"})
        assert (await sh("cat x", sandbox="t")).output == "y"

    play(scene)
