"""The report: opens on any run, needs nothing from outside, shows the numbers, names no host."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miles_hpc.cli.report import write_report
from miles_hpc.cli.report_axes import smooth
from miles_hpc.core.errors import UserError
from tests.fakes import make_events

PNG = b"\x89PNG\r\n\x1a\n"
VOID = {"meta", "img", "source", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what a browser would load, the tags, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def loaded(self) -> list[str]:
        names = ("src", "srcset", "href", "action", "data")
        return [a[n] or "" for _, a in self.tags for n in names if n in a]


def page_of(run_dir: Path) -> Page:
    html, png = write_report(run_dir)
    assert (html, png) == (run_dir / "report.html", run_dir / "report.png")
    assert png.read_bytes().startswith(PNG)
    return Page(html.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    run_dir = make_events.write(tmp_path_factory.mktemp("run"))
    (run_dir / "audit.json").write_text(json.dumps({"lost": [], "trained_twice": 0}))
    found = page_of(run_dir)
    assert not list(run_dir.glob(".*.tmp"))
    return found


def test_self_contained(page: Page) -> None:
    loaded = page.loaded()
    assert len(loaded) >= 9
    for uri in loaded:
        assert uri.startswith("data:image/png;base64,")
        assert base64.b64decode(uri.split(",", 1)[1]).startswith(PNG)
    assert not [t for t, _ in page.tags if t in ("script", "link", "iframe")]


def test_headline_numbers(page: Page) -> None:
    text = " ".join(page.text.split())
    for words in ("0.23 → 0.84", "52 of 52", "640 of 640", "0 / 0", "2 allocations", "complete", "2 steps undone"):
        assert words in text, words
    assert "Not in this run" not in text


def test_every_evaluation_is_in_the_table(page: Page) -> None:
    text = " ".join(page.text.split())
    for words in ("pass@4", "own tokens", "Evaluation at step 44: ", "24 prompts × 4 episodes", "70 %"):
        assert words in text, words
    assert "Evaluation at step 31 skipped (overflow): one of step 28 is under way" in text


def test_names_no_host_and_no_address(page: Page) -> None:
    assert not any(host in page.text for host in ("vm1", "vm2", "vm3", "vm4", "10.0.0.3"))
    assert "Lost rollout node 2: no heartbeat for 5.0 s from rollout node 2 (an address)" in page.text


def test_tables_are_accessible(page: Page) -> None:
    tags = [t for t, _ in page.tags]
    assert tags.count("table") >= 5
    assert tags.count("caption") == tags.count("table") == tags.count("thead")
    assert all("scope" in a for t, a in page.tags if t == "th")
    assert all(a.get("alt") for t, a in page.tags if t == "img")
    assert next(a for t, a in page.tags if t == "html")["lang"] == "en"
    assert any(a.get("name") == "viewport" for t, a in page.tags if t == "meta")


def test_run_without_any_event(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert "not started" in page.text and "No events were written yet." in page.text
    assert "evaluation before RL" in page.text  # what is missing


@pytest.mark.parametrize("until", [1, 8, 30, 100])
def test_run_that_was_cut_anywhere(tmp_path: Path, until: int) -> None:
    page = page_of(make_events.write(tmp_path, until=until))
    assert "unfinished" in page.text and "evaluation after RL" in page.text


def test_hostile_and_odd_content(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    name, evil = "<script>alert(1)</script> $x^2$ $", "<img src=x onerror=alert(1)>"
    common = {"term": 1, "process": "controller"}
    events = [
        {"t": 0.0, "kind": "note", "name": "run_start", "run": name, "n_steps": 2, "sft_steps": 0},
        {"t": 1.0, "kind": "verdict", "name": "lost", "peer": evil, "evidence": evil},
        {"t": 2.0, "kind": "metric", "step": 1, "values": {"rollout/raw_reward": float("nan"), "perf/step_time": 0.0}},
        {"t": 3.0, "kind": "metric", "step": 2, "values": {f"rollout/reward/_${'k' * 40}": 0.5, "train/loss": 1e308}},
        {"t": 4.0, "kind": "metric", "step": 3, "values": {"sync/probe_logprob_abs_diff_mean": 0.0}},
        {"t": 5.0, "kind": "metric", "step": 4, "values": {"rollout/staleness_max": float("nan"), evil: 1.0}},
        {"t": 6.0, "kind": "note", "name": "evaluation", "when": "before", "mean": -3.5, "by_label": {evil: -3.5}},
    ]
    for event in events:
        make_events.append(tmp_path / "events", {**common, **event})
    with open(tmp_path / "events" / "controller.t000001.jsonl", "ab") as file:
        file.write(b'{"t": "soon", "kind": "note"}\n\xff\xfe\n{"t": 7.0, "kind": "metr')  # cut by a kill
    (tmp_path / "resolved.toml").write_text("this is = not [toml")
    (tmp_path / "audit.json").write_text("[1, 2")
    page = page_of(tmp_path)
    assert evil in page.text and name in page.text  # as text
    assert not [t for t, a in page.tags if t == "script" or "onerror" in a]


def test_written_again_replaces(tmp_path: Path) -> None:
    page_of(make_events.write(tmp_path, until=20))
    for path in (tmp_path / "events").glob("*"):
        path.unlink()
    assert "complete" in page_of(make_events.write(tmp_path)).text


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        write_report(tmp_path / "none")


def test_smoothing_keeps_constants_and_length() -> None:
    assert smooth([2.0] * 7) == [2.0] * 7
    assert smooth([]) == []
    assert smooth([1.0, float("nan"), 3.0])[1] == 2.0


def test_import_is_light() -> None:
    """The command line imports these modules before it knows what is asked for."""
    code = "import sys, miles_hpc.cli.report, miles_hpc.cli.watch; print([m for m in %r if m in sys.modules])"
    heavy = ("matplotlib", "rich", "jinja2", "torch", "mpi4py")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code % (heavy,)], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
