"""Questions from data files: what is read, what is refused, how rows are dealt and graded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.cli.main import main
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage
from miles_hpc.rollout.environments.math import MathEnvironment, MathOptions, read_rows
from miles_hpc.rollout.environments.options import deal
from miles_hpc.rollout.sandbox import SandboxClient
from tests.exploring import examples

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
NOWHERE = SandboxClient()  # no host is connected: whoever used it would wait and fail


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"input": f"What is {i} + {i}?", "label": 2 * i, **more} for i in range(n)]


def answer(environment: MathEnvironment, seed: int, text: str, split: str = "train") -> float:
    episode = environment.start(environment.prompt(seed, split=split), NOWHERE, episode_id="e", seed=0)
    turn = asyncio.run(episode.step(text))
    assert turn.done and not turn.messages
    return turn.reward


# ------------------------------------------------------------------------------------------------ what is read


def test_texts_messages_numbers_and_renamed_keys(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    file = write(
        tmp_path / "q.jsonl",
        {"problem": "2 + 2?", "answer": 4, "extra": [1, 2], "about": {"level": 5}},
        "",
        {"problem": messages, "answer": "2", "about": None},
    )
    options = MathOptions(
        prompt_data=file, input_key="problem", label_key="answer", metadata_key="about", rm_type="math", system="Think."
    )
    first, second = read_rows(Path(file), options)
    think = ChatMessage(role="system", content="Think.")
    assert first.messages == (think, ChatMessage(role="user", content="2 + 2?"))
    assert (first.place, first.label, first.metadata) == ("q.jsonl:1", 4, {"level": 5})
    assert [m.content for m in second.messages] == ["Be brief.", "1 + 1?"]  # its own system message stays
    assert (second.place, second.label, second.metadata, second.rm_type) == ("q.jsonl:3", "2", {}, "math")


BAD_ROWS = [
    ("{'input': 1}", "not JSON"),
    ("[1, 2]", "a list: expected a JSON object with input, label"),
    ('{"input": "x?"}', "no key 'label', it has input: set environment.options.label_key"),
    ('{"question": "x?", "label": 1}', "no key 'input', it has label, question"),
    ('{"input": "x?", "label": null}', "label: null: expected a text or a number"),
    ('{"input": "x?", "label": true}', "label: true or false"),
    ('{"input": "x?", "label": ["1"]}', "label: a list"),
    ('{"input": 5, "label": 1}', "input: a number: expected a text, or a list"),
    ('{"input": [], "label": 1}', "input: a list"),
    ('{"input": "  ", "label": 1}', "the last message"),
    ('{"input": [{"role": "robot", "content": "x"}], "label": 1}', "message 0"),
    ('{"input": [{"role": "user", "content": [{"type": "text"}]}], "label": 1}', "message 0"),
    ('{"input": [{"role": "assistant", "content": "x"}], "label": 1}', "the last message"),
    ('{"input": "x?", "label": 1, "metadata": "hard"}', "metadata: a text: expected an object"),
    ('{"input": "x?", "label": 1, "metadata": {"rm_type": "maths"}}', "no reward named 'maths'"),
    ('{"input": "x?", "label": 1, "metadata": {"rm_type": "remote_rm"}}', "isn't built in"),
    ('{"input": "x?", "label": "Z", "metadata": {"rm_type": "gpqa"}}', "label 'Z'"),
    ('{"input": "x?", "label": 1, "metadata": {"n": 123456789012345678901234567890}}', "beyond 64 bits"),
    ('{"input": "x?", "label": 1, "metadata": {"rm_type": "nosuchmodule:f"}}', "can't load"),
    ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "not JSON"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_ROWS)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    file = write(tmp_path / "q.jsonl", rows(1)[0], line)
    with pytest.raises(UserError) as caught:
        MathEnvironment({"prompt_data": file, "rm_type": "math"})
    assert str(caught.value).startswith("q.jsonl:2: ") and complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files_and_options(tmp_path: Path) -> None:
    good = write(tmp_path / "q.jsonl", *rows(5))
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "missing required field `prompt_data`"),
        ({"prompt_data": good, "inputkey": "q"}, "the math environment knows prompt_data"),
        ({"prompt_data": str(tmp_path / "none"), "rm_type": "math"}, "No such file"),
        ({"prompt_data": str(tmp_path), "rm_type": "math"}, "Is a directory"),
        ({"prompt_data": write(tmp_path / "empty", "", ""), "rm_type": "math"}, "no questions in it"),
        ({"prompt_data": good}, "q.jsonl:1: no rm_type for this prompt"),
        ({"prompt_data": good, "rm_type": "math", "eval_share": 1.0}, "leave some for training"),
        ({"prompt_data": good, "rm_type": "math", "demo_share": 0.5}, "need solution_key"),
        ({"prompt_data": good, "rm_type": "math", "eval_prompt_data": good}, "no question is left for training"),
    ]
    for options, complaint in cases:
        with pytest.raises(UserError, match=complaint.replace("(", r"\(")):
            MathEnvironment(options)


def test_submit_says_it_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "q.jsonl", rows(1)[0], {"input": "x?"})
    options = ["environment.name=math", 'environment.options={prompt_data="q.jsonl", rm_type="math"}']
    command = ["submit", "demo", "--site", "slurm_box", "--run-dir", "here", "--dry-run"]
    assert main([*command, *(part for option in options for part in ("--set", option))]) == 2
    assert "q.jsonl:2: no key 'label'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]


# ------------------------------------------------------------------------------------------------ who gets what


def questions(environment: MathEnvironment, split: str, n: int = 400) -> set[str]:
    return {environment.prompt(seed, split=split).messages[-1].content for seed in range(n)}


def test_every_row_is_in_one_split_and_stays_there(tmp_path: Path) -> None:
    options = {"rm_type": "math", "eval_share": 0.3, "demo_share": 0.2, "solution_key": "how"}
    some, more = rows(100, how="so"), rows(130, how="so")
    few = MathEnvironment({"prompt_data": write(tmp_path / "a", *some, *some), **options})
    many = MathEnvironment({"prompt_data": write(tmp_path / "b", *reversed(more)), **options})
    seen = {split: questions(few, split) for split in ("train", "eval", "demo")}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values())) == 100
    assert 15 <= len(seen["eval"]) <= 45 and 8 <= len(seen["demo"]) <= 35
    for split, asked in seen.items():
        assert asked <= questions(many, split)


def test_a_second_file_is_held_out_whole_and_never_trained(tmp_path: Path) -> None:
    train, held = write(tmp_path / "a", *rows(30)), write(tmp_path / "b", *rows(12))
    environment = MathEnvironment({"prompt_data": train, "eval_prompt_data": held, "rm_type": "math"})
    assert len(questions(environment, "eval")) == 12
    assert len(questions(environment, "train")) == 18
    assert not questions(environment, "eval") & questions(environment, "train")


def test_an_empty_split_says_what_to_do(tmp_path: Path) -> None:
    environment = MathEnvironment({"prompt_data": write(tmp_path / "a", *rows(3)), "rm_type": "math", "eval_share": 0})
    for split in ("eval", "demo"):
        with pytest.raises(UserError, match="raise eval_share or demo_share"):
            environment.prompt(1, split=split)
    with pytest.raises(UserError, match="expected one of train, eval, demo"):
        environment.prompt(1, split="test")


@settings(max_examples=examples(50))
@given(tasks=st.sets(st.binary(max_size=20), min_size=1, max_size=50))
def test_shares_only_grow(tasks: set[bytes]) -> None:
    """A task that is held out stays so when more is held out."""
    for task in tasks:
        splits = [deal(task, eval_share=share, demo_share=0.0) for share in (0.0, 0.25, 0.5, 0.75)]
        assert splits == sorted(splits, reverse=True) and splits[0] == "train"


# ------------------------------------------------------------------------------------------------ what it is worth


def test_rewards_labels_and_demonstrations() -> None:
    environment = MathEnvironment(
        {
            "prompt_data": str(QUESTIONS),
            "rm_type": "math",
            "report_key": "source",
            "solution_key": "solution",
            "demo_share": 0.3,
        }
    )
    labels = set()
    for seed in range(200):
        prompt = environment.prompt(seed, split="demo")
        labels.add(prompt.label)
        episode = environment.start(prompt, NOWHERE, episode_id="e", seed=0)
        text = episode.demonstrate()
        assert text and asyncio.run(episode.step(text)).reward == 1.0
        assert episode.demonstrate() is None
        assert answer(environment, seed, "I don't know", "demo") == 0.0
    assert labels >= {"sums", "fractions"}
    assert environment.start(environment.prompt(1, split="train"), NOWHERE, episode_id="e", seed=0).demonstrate()


def test_a_rows_own_rule_goes_before_the_options(tmp_path: Path) -> None:
    row = {"input": "Which?", "label": "blue", "metadata": {"rm_type": "exact_match"}}
    environment = MathEnvironment({"prompt_data": write(tmp_path / "a", row), "rm_type": "math", "eval_share": 0})
    assert environment.prompt(0, split="train").label == "exact_match"
    assert answer(environment, 0, "Blue") == 1.0 and answer(environment, 0, r"\boxed{blue}") == 0.0


def length_reward(response: str, label: str, metadata: dict[str, Any]) -> float:
    """A user's own: 1 when the response has the label's length."""
    return float(len(response) == int(label))


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    file = write(tmp_path / "a", {"input": "Five letters, please.", "label": 5})
    environment = MathEnvironment({"prompt_data": file, "rm_type": f"{__name__}:length_reward", "eval_share": 0})
    assert answer(environment, 3, "12345") == 1.0 and answer(environment, 3, "1234") == 0.0
