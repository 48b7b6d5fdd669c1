"""Wheels for a machine without internet: resolved and fetched on a connected one, carried in parts, checked there.

    target      pip list --format=json > installed.json          and: python --version, uname -m, ldd --version
    connected   python -m tools.wheelhouse plan sglang --installed installed.json --python 3.12.3 -o plan.json
                python -m tools.wheelhouse fetch plan.json wheels
                python -m tools.wheelhouse pack plan.json wheels carried --part-bytes 90000000 --gpu 90
    target      python -m tools.wheelhouse unpack carried wheelhouse
                pip install --no-index --find-links wheelhouse sglang

| command | |
|---|---|
| plan | pip's own resolver, asked as if it ran on the target; what is installed there isn't planned |
| fetch | pip downloads exactly the planned wheels, by digest; can be interrupted and repeated |
| pack | leaves out members on request (--gpu, --drop), splits, writes a manifest of digests |
| unpack | checks every part, then makes the folder of wheels |
| verify | parts or unpacked wheels against the manifest, and the manifest's target against this Python |

Options after `--` go to pip (--index-url, --extra-index-url, --find-links, --no-index). Exit codes: 2 for bad input, 3
for a file that isn't what its digest says.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from miles_hpc.core.errors import IntegrityError, UserError
from tools.wheelhouse.parts import Manifest, pack, unpack, verify
from tools.wheelhouse.prune import prune_wheel
from tools.wheelhouse.resolve import fetch, make_plan, read_plan, sha256_of, write_plan
from tools.wheelhouse.target import Target, parse_installed

_PIP_OPTIONS = ("--index-url", "--extra-index-url", "--find-links", "--no-index", "--pre", "--trusted-host", "--cert")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, pip_options = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    args = _parser().parse_args(ours)
    try:
        _check_pip_options(args.command, pip_options)
        return int(args.run(args, pip_options))
    except UserError as error:
        print(f"wheelhouse: error: {error}", file=sys.stderr)
        return 2
    except (IntegrityError, OSError) as error:
        print(f"wheelhouse: error: {error}", file=sys.stderr)
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wheelhouse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("plan", help="which wheels the target lacks")
    one.add_argument("requirements", nargs="+", help="as for pip: NAME, NAME==VERSION, NAME[EXTRA]")
    one.add_argument("--python", required=True, help="the target's version, 3.12 or better 3.12.3")
    one.add_argument("--machine", choices=("x86_64", "aarch64"), default="x86_64")
    one.add_argument("--glibc", default="2.28", help="the target's (default: %(default)s)")
    one.add_argument("--installed", type=Path, help="what 'pip freeze' or 'pip list --format=json' prints there")
    one.add_argument("--upgrade", action="store_true", help="allow that installed packages are replaced")
    one.add_argument("-o", "--output", type=Path, default=Path("plan.json"))
    one.set_defaults(run=_plan)
    one = commands.add_parser("fetch", help="download a plan's wheels")
    one.add_argument("plan", type=Path)
    one.add_argument("folder", type=Path)
    one.set_defaults(run=_fetch)
    one = commands.add_parser("pack", help="wheels into parts with a manifest")
    one.add_argument("plan", type=Path)
    one.add_argument("wheels", type=Path)
    one.add_argument("folder", type=Path, help="is made")
    one.add_argument("--part-bytes", type=int, default=1_000_000_000, help="(default: %(default)s)")
    one.add_argument("--gpu", type=int, action="append", default=[], help="keep binaries of this architecture, as 90")
    one.add_argument("--drop", action="append", default=[], help="leave out members that match, as '*/libxgrammar.a'")
    one.set_defaults(run=_pack)
    one = commands.add_parser("unpack", help="parts into a folder of wheels")
    one.add_argument("parts", type=Path)
    one.add_argument("folder", type=Path, help="is made")
    one.set_defaults(run=_unpack)
    one = commands.add_parser("verify", help="compare parts or wheels with their manifest")
    one.add_argument("folder", type=Path)
    one.set_defaults(run=_verify)
    return parser


def _plan(args: argparse.Namespace, pip_options: list[str]) -> int:
    installed = {}
    if args.installed is not None:
        try:
            installed = parse_installed(args.installed.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--installed: {args.installed}: {error}") from error
    target = Target(python=args.python, machine=args.machine, glibc=args.glibc, installed=installed)
    plan = make_plan(target, args.requirements, pip_options=pip_options, upgrade=args.upgrade)
    write_plan(plan, args.output)
    for wheel in plan.wheels:
        print(f"{wheel.name} {wheel.version}" + (f" (replaces {wheel.replaces})" if wheel.replaces else ""))
    print(f"{len(plan.wheels)} wheels, planned in {args.output}")
    return 0


def _fetch(args: argparse.Namespace, pip_options: list[str]) -> int:
    paths = fetch(read_plan(args.plan), args.folder, pip_options=pip_options)
    print(f"{len(paths)} wheels of {_megabytes(sum(path.stat().st_size for path in paths))} in {args.folder}")
    return 0


def _pack(args: argparse.Namespace, pip_options: list[str]) -> int:
    plan = read_plan(args.plan)
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder.parent, prefix=".pruned-") as temporary:
        wheels: list[tuple[Path, list[str]]] = []
        for wheel in plan.wheels:
            path = args.wheels / wheel.file
            if not path.is_file() or sha256_of(path) != wheel.sha256:
                raise UserError(f"{path}: missing, or not the planned wheel: run 'wheelhouse fetch' first")
            wheels.append(prune_wheel(path, Path(temporary), drop=args.drop, gpus=args.gpu))
        manifest = pack(
            wheels, args.folder, target=plan.target, requirements=plan.requirements, part_bytes=args.part_bytes
        )
    for entry in manifest.wheels:
        if entry.dropped:
            print(f"{entry.file}: {len(entry.dropped)} members left out")
    total = sum(part.n_bytes for part in manifest.parts)
    print(f"{len(manifest.wheels)} wheels in {len(manifest.parts)} parts of {_megabytes(total)} in {args.folder}")
    return 0


def _unpack(args: argparse.Namespace, pip_options: list[str]) -> int:
    manifest = unpack(args.parts, args.folder)
    print(f"{len(manifest.wheels)} wheels in {args.folder}; to install them:")
    print(f"pip install --no-index --find-links {args.folder} {' '.join(manifest.requirements)}")
    return 0


def _verify(args: argparse.Namespace, pip_options: list[str]) -> int:
    manifest = verify(args.folder)
    print(f"{args.folder}: as its manifest says")
    for complaint in _unfit(manifest):
        print(f"wheelhouse: warning: {complaint}", file=sys.stderr)
    return 0


def _unfit(manifest: Manifest) -> list[str]:
    """How this machine differs from the one that the wheels are for."""
    target = manifest.target
    here = f"3.{sys.version_info.minor}"
    complaints = []
    if here != f"3.{target.minor}":
        complaints.append(f"this is Python {here}, the wheels are for {target.python}")
    if platform.machine() != target.machine:
        complaints.append(f"this machine is {platform.machine()}, the wheels are for {target.machine}")
    glibc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    if glibc and [int(n) for n in glibc.split()[-1].split(".")] < [int(n) for n in target.glibc.split(".")]:
        complaints.append(f"glibc here is {glibc.split()[-1]}, the wheels are for {target.glibc} or newer")
    return complaints


def _check_pip_options(command: str, options: list[str]) -> None:
    """Only where packages are found: anything else would change what is planned behind the plan's back."""
    if options and command not in ("plan", "fetch"):
        raise UserError(f"{command}: takes no options for pip")
    for option in options:
        if option.startswith("-") and option.partition("=")[0] not in _PIP_OPTIONS:
            raise UserError(f"pip option {option}: expected one of {', '.join(_PIP_OPTIONS)}")


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
