"""pip as it would answer on another machine. A program: `python -I -S pip_for_target.py SETTINGS.json PIP-ARGUMENTS`.

pip takes `--platform` and `--python-version` for choosing wheels, but evaluates the markers of dependencies
(`python_version < "3.12"`, `platform_machine == "aarch64"`) for the interpreter that runs it, and knows only what is
installed beside it. So this starts pip with

    sys.path         the standard library, pip alone, and a folder that says what the target has
    markers          evaluated for the target

SETTINGS.json: {"pip": folder that holds pip, "site": the folder of installed packages, "markers": {...}}. Exit code 70
when this pip has no place where markers can be set.
"""

import json
import runpy
import sys


def main() -> int:
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    sys.path[:] = [path for path in sys.path if "site-packages" not in path and "dist-packages" not in path]
    sys.path += [settings["pip"], settings["site"]]
    from pip._vendor.packaging import markers  # type: ignore[import-not-found,unused-ignore]

    markers.default_environment = lambda: dict(settings["markers"])  # type: ignore
    version = settings["markers"]["python_full_version"]
    machine = settings["markers"]["platform_machine"]
    said = markers.Marker(f"python_full_version == '{version}' and platform_machine == '{machine}'").evaluate()
    if not said or markers.Marker("platform_machine == 'another'").evaluate():
        print("this pip evaluates markers in a way that can't be set", file=sys.stderr)
        return 70
    _allow_dry_runs()
    sys.argv = ["pip", *sys.argv[2:]]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
    return 0


def _allow_dry_runs() -> None:
    """Old versions of pip (seen: 23.2) want --target beside --platform even where nothing is installed; with it they
    would leave out of account what the target has."""
    from pip._internal.cli import cmdoptions  # type: ignore[import-not-found,unused-ignore]

    check = cmdoptions.check_dist_restriction

    def without_target(options, check_target=False):  # type: ignore[no-untyped-def]
        check(options, check_target=check_target and not getattr(options, "dry_run", False))

    cmdoptions.check_dist_restriction = without_target


if __name__ == "__main__":
    sys.exit(main())
