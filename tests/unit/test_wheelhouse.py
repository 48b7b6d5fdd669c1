"""The wheelhouse with tiny wheels in a folder: pip resolves for another machine, nothing goes over the network."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from miles_hpc.core.errors import IntegrityError, UserError
from tools.wheelhouse.__main__ import main
from tools.wheelhouse.parts import MANIFEST, pack, read_manifest, unpack, verify
from tools.wheelhouse.prune import dropped_members, prune_wheel
from tools.wheelhouse.resolve import Plan, fetch, make_plan, read_plan, sha256_of, write_plan
from tools.wheelhouse.target import Target, parse_installed

ARM = Target(python="3.12.3", machine="aarch64", glibc="2.34")


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {text}\n" for text in requires]
    members = {
        f"{name}.py": b"x = 1\n",
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{''.join(lines)}".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = io.StringIO()
    csv.writer(record).writerows([member, digest(data), len(data)] for member, data in members.items())
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data in members.items():
            wheel.writestr(member, data)
        wheel.writestr(f"{info}/RECORD", f"{record.getvalue()}{info}/RECORD,,\n")
    return path


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture
def index(tmp_path: Path) -> list[str]:
    """pip options of a folder of wheels that need each other."""
    folder = tmp_path / "index"
    markers = ["old; python_version < '3.12'", "new>=2; python_version >= '3.12'", "arm; platform_machine == 'aarch64'"]
    make_wheel(folder, "root", requires=[*markers, "torch==2.9.1", "more; extra == 'all'", "shared"])
    make_wheel(folder, "old")
    make_wheel(folder, "new", "1.0")
    make_wheel(folder, "new", "2.5", requires=["shared<2"])
    make_wheel(folder, "arm", tag="cp312-cp312-manylinux_2_34_aarch64")
    make_wheel(folder, "arm", "1.1", tag="cp312-cp312-manylinux_2_35_aarch64")  # newer glibc than the target's
    make_wheel(folder, "arm", "1.2", tag="cp311-cp311-manylinux_2_17_aarch64")
    make_wheel(folder, "arm", "1.3", tag="cp312-cp312-manylinux_2_17_x86_64")
    make_wheel(folder, "shared", "1.5")
    make_wheel(folder, "shared", "2.0")
    make_wheel(folder, "torch", "2.9.1", requires=["huge"])
    make_wheel(folder, "more", requires=["pip"])
    return ["--no-index", "--find-links", str(folder)]


def names(plan: Plan) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in plan.wheels}


# ------------------------------------------------------------------------------------------------ the target


def test_what_pip_lists_is_read() -> None:
    assert parse_installed("# a remark\nPyYAML==6.0\n\nzope.interface==5.0.post1\n") == {
        "pyyaml": "6.0",
        "zope-interface": "5.0.post1",
    }
    listed = json.dumps([{"name": "torch", "version": "2.11.0+cu130"}, {"name": "A_b", "version": "1", "x": 2}])
    assert parse_installed(listed) == {"torch": "2.11.0+cu130", "a-b": "1"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a==1\nb", "line 2: 'b': expected NAME==VERSION"),
        ("a @ file:///x/a.whl", "use 'pip list --format=json' there"),
        ("-e /home/me/a", "use 'pip list --format=json' there"),
        ("a>=1", "expected NAME==VERSION"),
        ("[1]", "expected what 'pip list --format=json' prints"),
        ('[{"name": "a"}]', "expected what 'pip list --format=json' prints"),
        ("[", "expected what 'pip list --format=json' prints"),
    ],
)
def test_lists_that_can_not_be_read(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_installed(text)
    assert complaint in str(caught.value)


def test_platform_tags_reach_down_from_the_targets_glibc() -> None:
    tags = Target(python="3.11", glibc="2.17").platforms
    assert tags[0] == "manylinux_2_17_x86_64" and "manylinux_2_18_x86_64" not in tags
    assert {"manylinux2014_x86_64", "manylinux_2_5_x86_64", "manylinux1_x86_64", "linux_x86_64"} < set(tags)
    assert "manylinux2014_aarch64" not in Target(python="3.11", machine="aarch64", glibc="2.16").platforms


@pytest.mark.parametrize("target", [Target(python="3"), Target(python="3.x"), Target(python="3.12", glibc="musl")])
def test_bad_targets(target: Target) -> None:
    with pytest.raises(UserError, match="expected a version such as"):
        target.check()


# ------------------------------------------------------------------------------------------------ plan and fetch


def test_a_plan_is_made_as_on_the_target(index: list[str]) -> None:
    """Markers, tags and what is installed are the target's, whatever runs this test."""
    target = Target(
        python="3.12.3", machine="aarch64", glibc="2.34", installed={"torch": "2.9.1+cu130", "shared": "1.4"}
    )
    plan = make_plan(target, ["root"], pip_options=index)
    assert names(plan) == {"root": "1.0", "new": "2.5", "arm": "1.0"}  # torch's own dependency is met there
    assert all(len(wheel.sha256) == 64 and not wheel.replaces for wheel in plan.wheels)
    assert [wheel.file for wheel in plan.wheels if wheel.name == "arm"] == [
        "arm-1.0-cp312-cp312-manylinux_2_34_aarch64.whl"
    ]
    older = Target(python="3.11", installed={"torch": "2.9.1"})
    assert names(make_plan(older, ["root"], pip_options=index)) == {"root": "1.0", "old": "1.0", "shared": "2.0"}


def test_what_pip_has_beside_it_here_is_not_on_the_target(index: list[str]) -> None:
    with pytest.raises(UserError, match="pip"):  # `more` needs pip, which the folder doesn't have
        make_plan(ARM, ["more"], pip_options=index)


def test_replacing_what_is_installed_has_to_be_asked_for(index: list[str]) -> None:
    target = Target(python="3.11", installed={"torch": "2.11.0", "huge": "1"})
    with pytest.raises(UserError, match=r"would replace torch 2\.11\.0 by 2\.9\.1 on the target"):
        make_plan(target, ["root"], pip_options=index)
    plan = make_plan(target, ["root"], pip_options=index, upgrade=True)
    assert {wheel.name: wheel.replaces for wheel in plan.wheels}["torch"] == "2.11.0"


def test_what_can_not_be_resolved_is_pips_word_on_one_line(index: list[str]) -> None:
    for wanted in (["nothing"], ["new>9"], ["torch"], ["new==1.0", "new==2.5"], ["not a name"]):
        with pytest.raises(UserError) as caught:
            make_plan(ARM, wanted, pip_options=index)
        assert str(caught.value).startswith("pip install: ERROR") and "\n" not in str(caught.value)


def test_fetch_keeps_what_is_right_and_replaces_what_is_not(index: list[str], tmp_path: Path) -> None:
    target = Target(python="3.12", machine="aarch64", glibc="2.34", installed={"torch": "2.9.1"})
    plan = make_plan(target, ["root"], pip_options=index)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    folder = tmp_path / "wheels"
    paths = fetch(plan, folder, pip_options=index)
    assert [sha256_of(path) for path in paths] == [wheel.sha256 for wheel in plan.wheels]
    kept = {path.name: path.stat().st_mtime_ns for path in paths}
    paths[0].write_bytes(b"half of it")
    fetch(plan, folder, pip_options=index)
    assert sha256_of(paths[0]) == plan.wheels[0].sha256
    assert {p.name for p in paths if p.stat().st_mtime_ns == kept[p.name]} == {p.name for p in paths[1:]}
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)


def test_a_wheel_that_changed_since_the_plan_is_refused(index: list[str], tmp_path: Path) -> None:
    plan = make_plan(ARM, ["old"], pip_options=index)
    make_wheel(Path(index[-1]), "old", files={"more.py": b"changed"})
    with pytest.raises(UserError, match="pip download: ERROR"):
        fetch(plan, tmp_path / "wheels", pip_options=index)
    assert not list((tmp_path / "wheels").iterdir())


# ------------------------------------------------------------------------------------------------ prune


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("k/sm90/ops.so", True),
        ("k/sm100/ops.so", False),
        ("k/ops_sm100.abi3.so", False),
        ("k/ops.sm_90a.cubin", True),
        ("k/sm90-sm100.so", True),
        ("k/sm75_sm80.so", False),
        ("k/small.so", True),
        ("k/prism100/x", True),
        ("k/docs/index.html", False),
        ("k-1.dist-info/sm100/LICENSE", True),
    ],
)
def test_members_by_architecture_and_pattern(name: str, kept: bool) -> None:
    assert (dropped_members([name], drop=["*/docs/*"], gpus=[90]) == []) is kept
    assert dropped_members([name]) == []


def test_a_pruned_wheel_is_right_and_installs(tmp_path: Path) -> None:
    files = {"k/sm90/a.so": b"a" * 3000, "k/sm100/a.so": b"b" * 3000, "k/c,d.txt": b"comma", "k/__init__.py": b""}
    path = make_wheel(tmp_path / "in", "kernels", "0.4", files=files, tag="cp310-abi3-manylinux_2_17_x86_64")
    (tmp_path / "out").mkdir()
    pruned, gone = prune_wheel(path, tmp_path / "out", gpus=[90])
    assert gone == ["k/sm100/a.so"] and pruned.name == "kernels-0.4-0pruned-cp310-abi3-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(pruned) as wheel:
        assert wheel.testzip() is None
        rows = list(csv.reader(io.StringIO(wheel.read("kernels-0.4.dist-info/RECORD").decode())))
        assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
        for name, hashed, size in rows:
            if name.endswith("/RECORD"):
                assert (hashed, size) == ("", "")
            else:
                assert (hashed, size) == (digest(wheel.read(name)), str(len(wheel.read(name))))
        assert b"Build: 0pruned" in wheel.read("kernels-0.4.dist-info/WHEEL")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    target = ["--target", str(tmp_path / "site"), "--platform", "manylinux_2_17_x86_64", "--only-binary=:all:"]
    subprocess.run([*command, *target, str(pruned)], check=True, timeout=120)
    assert sorted(p.name for p in (tmp_path / "site" / "k").rglob("*") if p.is_file()) == [
        "__init__.py",
        "a.so",
        "c,d.txt",
    ]


def test_a_wheel_that_keeps_everything_stays_itself_and_others_are_refused(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "plain")
    assert prune_wheel(path, tmp_path / "nowhere", gpus=[90], drop=["none"]) == (path, [])
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(b"PK no")
    with pytest.raises(UserError, match="expected a wheel"):
        prune_wheel(tmp_path / "x-1-py3-none-any.whl", tmp_path, drop=["*"])
    with zipfile.ZipFile(tmp_path / "y-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("y.py", "")
    with pytest.raises(UserError, match=r"no \.dist-info/RECORD"):
        prune_wheel(tmp_path / "y-1-py3-none-any.whl", tmp_path, drop=["*.py"])


# ------------------------------------------------------------------------------------------------ parts


def packed(tmp_path: Path) -> Path:
    wheels = [make_wheel(tmp_path / "w", f"p{i}", files={"data": bytes([i]) * 70_000}) for i in range(4)]
    pack([(path, ()) for path in wheels], tmp_path / "parts", target=ARM, requirements=["p0"], part_bytes=100_000)
    return tmp_path / "parts"


def test_parts_are_bounded_the_same_every_time_and_come_back(tmp_path: Path) -> None:
    parts = packed(tmp_path)
    manifest = verify(parts)
    sizes = [(parts / part.file).stat().st_size for part in manifest.parts]
    assert sizes[:-1] == [100_000] * (len(sizes) - 1) and 0 < sizes[-1] <= 100_000 and len(sizes) > 2
    assert sorted(p.name for p in parts.iterdir()) == sorted([MANIFEST, *(part.file for part in manifest.parts)])
    again = tmp_path / "again"
    again.mkdir()
    assert [part.sha256 for part in verify(packed(again)).parts] == [part.sha256 for part in manifest.parts]
    unpack(parts, tmp_path / "deep" / "house")
    for entry in verify(tmp_path / "deep" / "house").wheels:
        assert (tmp_path / "deep" / "house" / entry.file).read_bytes() == (tmp_path / "w" / entry.file).read_bytes()


def test_any_damage_is_found_before_anything_is_unpacked(tmp_path: Path) -> None:
    parts = packed(tmp_path)
    for part in verify(parts).parts:
        path = parts / part.file
        good = path.read_bytes()
        for bad in (good[:-1], good + b"x", bytes([good[0] ^ 1]) + good[1:], None):
            if bad is None:
                path.unlink()
            else:
                path.write_bytes(bad)
            with pytest.raises(IntegrityError, match="copy it again"):
                unpack(parts, tmp_path / "house")
            path.write_bytes(good)
    assert not (tmp_path / "house").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_manifests_that_lie_are_refused(tmp_path: Path) -> None:
    parts = packed(tmp_path)
    good = (parts / MANIFEST).read_text()
    for old, new in (("p0-1.0-py3", "../p0-1.0-py3"), ("wheels.tar.000", "/etc/hostname"), ('"n_bytes"', '"size"')):
        (parts / MANIFEST).write_text(good.replace(old, new))
        with pytest.raises(UserError):
            unpack(parts, tmp_path / "house")
    for old, new in (("p0-1.0-py3", "q0-1.0-py3"), (read_manifest_sha(good), "0" * 64)):
        (parts / MANIFEST).write_text(good.replace(old, new))
        with pytest.raises(IntegrityError):
            unpack(parts, tmp_path / "house")
    assert not (tmp_path / "house").exists()


def read_manifest_sha(text: str) -> str:
    return str(json.loads(text)["wheels"][0]["sha256"])


def test_members_that_are_no_wheels_are_refused(tmp_path: Path) -> None:
    """Parts with right digests, made by somebody else."""
    parts = packed(tmp_path)
    manifest = json.loads((parts / MANIFEST).read_text())
    for name, kind in (("../escape", tarfile.REGTYPE), (manifest["wheels"][0]["file"], tarfile.SYMTYPE)):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        (parts / "wheels.tar.000").write_bytes(stream.getvalue())
        entry = {"file": "wheels.tar.000", "n_bytes": len(stream.getvalue()), "dropped": []}
        entry["sha256"] = sha256_of(parts / "wheels.tar.000")
        (parts / MANIFEST).write_text(json.dumps({**manifest, "parts": [entry]}))
        with pytest.raises(IntegrityError, match="the manifest has no such wheel"):
            unpack(parts, tmp_path / "house")
    assert not (tmp_path / "escape").exists() and not (tmp_path / "house").exists()


def test_folders_and_sizes_that_can_not_be(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "a")
    common = {"target": ARM, "requirements": ["a"]}
    with pytest.raises(UserError, match="exists"):
        pack([(path, ())], tmp_path, part_bytes=10**6, **common)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="each with a name of its own"):
        pack([(path, ()), (path, ())], tmp_path / "p", part_bytes=10**6, **common)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected at least 65536"):
        pack([(path, ())], tmp_path / "p", part_bytes=10, **common)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="expected what 'wheelhouse pack' or 'unpack' has written"):
        read_manifest(tmp_path)


# ------------------------------------------------------------------------------------------------ the program


def test_from_a_list_to_an_installable_folder(
    index: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    here = f"3.{sys.version_info.minor}"
    make_wheel(Path(index[-1]), "app", requires=["kern"])
    make_wheel(Path(index[-1]), "kern", files={"kern_sm90.so": b"1" * 90_000, "kern_sm100.so": b"2" * 90_000})
    Path("have.txt").write_text("torch==2.9.1\n")
    assert main(["plan", "app", "--python", here, "--installed", "have.txt", "--", *index]) == 0
    assert main(["fetch", "plan.json", "wheels", "--", *index]) == 0
    assert main(["pack", "plan.json", "wheels", "carried", "--part-bytes", "70000", "--gpu", "90"]) == 0
    assert main(["verify", "carried"]) == 0
    assert main(["unpack", "carried", "house"]) == 0
    assert main(["verify", "house"]) == 0
    said = capsys.readouterr()
    assert "kern-1.0-0pruned-py3-none-any.whl: 1 members left out" in said.out
    assert "pip install --no-index --find-links house app" in said.out
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*command, "--find-links", "house", "--target", "site", "app"], check=True, timeout=120)
    assert Path("site/kern_sm90.so").exists() and not Path("site/kern_sm100.so").exists()


def test_errors_have_exit_codes_and_one_line(
    index: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "nothing", "--python", "3.12", "-o", str(tmp_path / "p"), "--", *index]) == 2
    assert main(["fetch", str(tmp_path / "p"), str(tmp_path / "w")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert main(["plan", "root", "--python", "3.12", "--installed", str(tmp_path / "no")]) == 2
    assert main(["plan", "root", "--python", "3.12", "--", "--user"]) == 2
    assert main(["verify", "x", "--", "--no-index"]) == 2
    parts = packed(tmp_path)
    (parts / "wheels.tar.001").write_bytes(b"")
    assert main(["unpack", str(parts), str(tmp_path / "house")]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7 and all(line.startswith("wheelhouse: error: ") for line in lines)


def test_verify_says_when_this_is_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Target(python="3.99", machine="aarch64", glibc="2.999")
    pack([(make_wheel(tmp_path, "a"), ())], tmp_path / "p", target=other, requirements=["a"], part_bytes=10**6)
    assert main(["verify", str(tmp_path / "p")]) == 0
    assert len([line for line in capsys.readouterr().err.splitlines() if "the wheels are for" in line]) >= 2
