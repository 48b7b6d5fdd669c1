"""Sessions against a client that bends its history and an engine that samples anything.

    python -m tools.fuzz_session [--turns 1000000] [--seconds S] [--seed 0] [--styles chatml,headers] [--json]
        [--folder MODEL_FOLDER[:CHAT_FAMILY] ...]        e.g. models/tokenizers/qwen3:qwen3 (tools/fetch_tokenizers)

| what varies | how |
|---|---|
| tokens | any ids: broken UTF-8, splits that the tokenizer wouldn't make; every way that a generation ends |
| history | linear with 0 to 2 turns of rollback, tree with few or many turns; two requests from one point at once |
| matcher | all three, with messages bent as far as each must bear, and further |
| messages | spelled-out control tokens, calls without content, words put into the assistant's mouth, other tools |
| template | the styles of `templates.py`, and the folders named; turns are dealt to them evenly |

After every request the prompt, token by token, the place where it attaches or the status is compared with notes that
are kept beside the session and with prompts made by transformers; at the end of each session, its samples are, bit for
bit. Callers edit what they handed over. Exit code 1 at the first difference, with the seed that plays it again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.template import CHAT_FAMILIES, ChatFamily
from tools.fuzz_session.notes import Violation
from tools.fuzz_session.oracle import Oracle
from tools.fuzz_session.tally import Tally, table
from tools.fuzz_session.templates import STYLES, folder_template, style_folder
from tools.fuzz_session.world import Played, World

_MATCHERS = ("strict", "loose_tool_call", "role_content_only")
_TELL_S = 60.0  # between words on stderr of how far it is


def fuzz(
    turns: int, seed: int, styles: list[str], folders: dict[Path, ChatFamily], *, seconds: float = float("inf")
) -> dict[str, Any]:
    """Play sessions until `turns` turns are recorded or so much time is over, evenly over styles and folders.

    Raises Violation, whose text names template, kind and seed; UserError for a folder that can't be used.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        named = {style: style_folder(style, Path(temporary) / style) for style in styles}
        named |= {folder.name: (folder, family) for folder, family in folders.items()}
        played = {name: _played(*one) for name, one in named.items()}
    tallies = {name: Tally() for name in played}
    done = sessions = 0
    told = began
    while done < turns and time.monotonic() - began < seconds:
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            print(f"{done} of {turns} turns after {told - began:.0f} s", file=sys.stderr, flush=True)
        name = min(tallies, key=lambda one: tallies[one].turns)
        rng = Random(f"{seed}-{sessions}")
        kind, matcher = rng.choice(("linear", "tree")), rng.choice(_MATCHERS)
        world = World(rng, played[name], kind, matcher)
        try:
            world.play(rng.choice((3, 10, 10, 10, 30)))
        except Violation as error:
            raise Violation(f"seed {seed}, session {sessions}, {name}, {kind}, {matcher}: {error}") from error
        tallies[name].add(world)
        done += world.notes.turns
        sessions += 1
    return {
        "templates": {name: tally.row() for name, tally in tallies.items()},
        "turns": done,
        "sessions": sessions,
        "mismatches": 0,  # the first one ends the run
        "seed": seed,
        "asked_turns": turns,
        "seconds": round(time.monotonic() - began, 1),
    }


def _played(folder: Path, family: ChatFamily) -> Played:
    _, template = folder_template(folder, family)
    oracle = Oracle(folder, family)
    return Played(template, oracle, oracle.split_texts(Random(0)))


def _folder(text: str) -> tuple[Path, ChatFamily]:
    path, _, family = text.partition(":")
    if (family or "default") not in CHAT_FAMILIES:
        raise argparse.ArgumentTypeError(f"chat family {family!r}: expected one of {', '.join(CHAT_FAMILIES)}")
    return Path(path), CHAT_FAMILIES[family or "default"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz_session", description="Fuzz the session core.")
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then, however many turns it were")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--styles", default=",".join(STYLES), help="comma-separated, may be empty: %(default)s")
    parser.add_argument(
        "--folder",
        type=_folder,
        action="append",
        default=[],
        metavar="FOLDER[:FAMILY]",
        help="a Hugging Face folder and its chat family; may be repeated",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    styles = [style for style in options.styles.split(",") if style]
    if unknown := set(styles) - set(STYLES):
        parser.error(f"unknown styles {', '.join(sorted(unknown))}: expected some of {', '.join(STYLES)}")
    if not styles and not options.folder:
        parser.error("neither styles nor folders: expected some")
    try:
        result = fuzz(options.turns, options.seed, styles, dict(options.folder), seconds=options.seconds)
    except Violation as error:
        print(f"violated: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"fuzz_session: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(result))
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
