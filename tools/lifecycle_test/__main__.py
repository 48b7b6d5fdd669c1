"""Play scenarios one after the other."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import tools.lifecycle_test as package
from miles_hpc.core.errors import MilesError, UserError
from tools.lifecycle_test import LAYOUTS, SCENARIOS, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="lifecycle_test", description=(package.__doc__ or "").splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"default: all of {', '.join(SCENARIOS)}")
    parser.add_argument("--layout", default="hetjob", help=f"some of {','.join(LAYOUTS)}; default: hetjob")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    parser.add_argument("--json", type=Path, help="append one line a scenario to this file")
    args = parser.parse_args()
    layouts = args.layout.split(",")
    names = args.scenarios or list(SCENARIOS)
    for given, known in ((names, SCENARIOS), (layouts, LAYOUTS)):
        if unknown := [one for one in given if one not in known]:
            print(
                f"lifecycle_test: error: unknown {unknown[0]!r}: expected some of {', '.join(known)}", file=sys.stderr
            )
            return 2
    failed = 0
    for layout in layouts:
        for name in names:
            try:
                result = play(name, layout, keep=args.keep)
            except (MilesError, UserError, subprocess.SubprocessError) as error:
                failed += 1
                result = {"scenario": name, "layout": layout, "FAILED": str(error)}
            line = json.dumps(result)
            print(line, flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(line + "\n")
    print(f"lifecycle_test: {'passed' if not failed else f'{failed} FAILED'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
