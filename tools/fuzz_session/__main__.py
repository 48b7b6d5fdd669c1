"""Sessions against a client that bends its history and an engine that samples anything.

    python -m tools.fuzz_session [--turns 1000000] [--seed 0] [--styles chatml,headers] [--folder MODEL ...] [--json]

| what varies | how |
|---|---|
| tokens | any ids: broken UTF-8, splits that the tokenizer wouldn't make; every way that a generation ends |
| history | linear with 0 to 2 turns of rollback, tree with few or many turns; two requests from one point at once |
| matcher | all three, with messages bent as far as each must bear, and further |
| template | the styles of `templates.py`, and Hugging Face folders named by --folder |

After every request the prompt, the place where it attaches or the status is compared with notes that are kept beside
the session; at the end of each session, its samples are, bit for bit. Exit code 1 at the first difference, with the
seed that plays it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tools.fuzz_session.templates import STYLES, folder_template, style_template
from tools.fuzz_session.world import Violation, World

_MATCHERS = ("strict", "loose_tool_call", "role_content_only")


def fuzz(turns: int, seed: int, styles: list[str], folders: list[Path]) -> dict[str, Any]:
    """Play sessions until `turns` turns are recorded. Raises Violation, whose text names style, kind and seed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        played = {style: style_template(style, Path(temporary) / style) for style in styles}
        played |= {folder.name: folder_template(folder) for folder in folders}
        recorded: Counter[str] = Counter()
        refused: Counter[int] = Counter()
        sessions = 0
        while sum(recorded.values()) < turns:
            style = list(played)[sessions % len(played)]
            rng = Random(f"{seed}-{sessions}")
            kind, matcher = rng.choice(("linear", "tree")), rng.choice(_MATCHERS)
            world = World(rng, *played[style], kind, matcher)
            try:
                world.play(rng.choice((3, 10, 10, 40)))
            except Violation as error:
                raise Violation(f"seed {seed}, session {sessions}, {style}, {kind}, {matcher}: {error}") from error
            recorded[style] += world.turns
            refused.update(world.refused)
            sessions += 1
    return {
        "turns": dict(recorded),
        "sessions": sessions,
        "refused": {str(status): n for status, n in sorted(refused.items())},
        "seconds": round(time.monotonic() - began, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz_session", description="Fuzz the session core.")
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--styles", default=",".join(STYLES), help="comma-separated: %(default)s")
    parser.add_argument(
        "--folder", type=Path, action="append", default=[], help="a Hugging Face folder; may be repeated"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    styles = [style for style in options.styles.split(",") if style]
    if unknown := set(styles) - set(STYLES):
        parser.error(f"unknown styles {', '.join(sorted(unknown))}: expected some of {', '.join(STYLES)}")
    try:
        result = fuzz(options.turns, options.seed, styles, options.folder)
    except Violation as error:
        print(f"violated: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
