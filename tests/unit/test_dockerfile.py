"""What of a Dockerfile is done, and what is listed as not done."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.environments.dockerfile import plan_dockerfile, read_instructions
from tests.exploring import examples

CONTEXT = ["a.txt", "b.txt", "conf.d/1.ini", "conf.d/deep/2.ini", "src/main.py", "x y.txt"]


def copies(text: str) -> dict[str, str]:
    """Target by source, of a Dockerfile after `FROM scratch`."""
    plan = plan_dockerfile(f"FROM scratch\n{text}", CONTEXT, default_workdir="/app")
    assert not plan.not_applied, plan.not_applied
    return {copied.source: copied.target for copied in plan.copies}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("COPY a.txt /app/", {"a.txt": "/app/a.txt"}),
        ("COPY a.txt /app/z", {"a.txt": "/app/z"}),
        ("COPY a.txt /app", {"a.txt": "/app/a.txt"}),  # the working folder is there already
        ("COPY a.txt .", {"a.txt": "/app/a.txt"}),
        ("COPY a.txt z", {"a.txt": "/app/z"}),
        ("COPY a.txt b.txt sub", {"a.txt": "/app/sub/a.txt", "b.txt": "/app/sub/b.txt"}),
        ("COPY *.txt ./t/", {"a.txt": "/app/t/a.txt", "b.txt": "/app/t/b.txt", "x y.txt": "/app/t/x y.txt"}),
        ("COPY conf.d /app/", {"conf.d/1.ini": "/app/1.ini", "conf.d/deep/2.ini": "/app/deep/2.ini"}),
        ("COPY conf.d/ conf.d/", {"conf.d/1.ini": "/app/conf.d/1.ini", "conf.d/deep/2.ini": "/app/conf.d/deep/2.ini"}),
        ("COPY conf.d/*.ini z/", {"conf.d/1.ini": "/app/z/1.ini"}),
        ("COPY src/main.py ../srv/./m.py", {"src/main.py": "/srv/m.py"}),
        ("WORKDIR /x\nWORKDIR y\nCOPY a.txt .", {"a.txt": "/x/y/a.txt"}),
        ('COPY ["x y.txt", "/app/"]', {"x y.txt": "/app/x y.txt"}),
        ("COPY 'x y.txt' .", {"x y.txt": "/app/x y.txt"}),
        ("COPY --chown=me:me /a.txt .", {"a.txt": "/app/a.txt"}),
        ("ADD a.txt .", {"a.txt": "/app/a.txt"}),
        ("copy \\\n  # a remark\n  a.txt \\\n  .", {"a.txt": "/app/a.txt"}),
        ("COPY a.txt d/\nCOPY b.txt d", {"a.txt": "/app/d/a.txt", "b.txt": "/app/d/b.txt"}),
        ("COPY . .", {name: f"/app/{name}" for name in CONTEXT}),
        ("COPY . /", {name: f"/{name}" for name in CONTEXT}),
        ("COPY a.txt .\nFROM scratch\nCOPY b.txt .", {"b.txt": "/app/b.txt"}),  # the last stage
    ],
)
def test_files_go_where_docker_puts_them(text: str, expected: dict[str, str]) -> None:
    assert copies(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "FROM debian:12",
        "RUN apt-get update && apt-get install -y gcc",
        "RUN <<EOF\nCOPY a.txt .\nEOF",
        "COPY <<EOF /app/x\nhello\nEOF",
        "COPY --from=build /x .",
        "COPY --exclude=a *.txt .",
        "COPY $FILE .",
        "COPY ../a.txt .",
        "COPY a.txt",
        "COPY [1, 2]",
        "COPY 'a.txt .",
        "ADD https://example.org/x .",
        "ADD src.tar.gz .",
        "USER nobody",
        'ENTRYPOINT ["x"]',
        "ENV PATH=/opt/bin:$PATH",
        "ENV 1X=y",
        "ENV A=b C",
        "WORKDIR $HOME",
        'SHELL ["/bin/zsh"]',
        "NONSENSE",
    ],
)
def test_what_can_not_be_done_is_listed_once(text: str) -> None:
    plan = plan_dockerfile(text, CONTEXT, default_workdir="/app")
    assert len(plan.not_applied) == 1 and plan.not_applied[0].endswith("(line 1)")
    assert plan.not_applied[0].startswith(text.split()[0]) and len(plan.not_applied[0]) < 80
    assert not plan.copies and not plan.env and not plan.workdir


def test_variables_modes_and_what_has_no_effect() -> None:
    plan = plan_dockerfile(
        '# syntax=docker/dockerfile:1\nFROM scratch\nLABEL a=b\nEXPOSE 80\nUSER root\nCMD ["x"]\nARG V=1\n'
        "ENV A=1 B='two words'\nENV C three words\nWORKDIR /app/\n"
        "COPY --chmod=755 a.txt .\nCOPY --chmod=0600 b.txt .\n",
        CONTEXT,
        default_workdir="/x",
    )
    assert plan.env == {"A": "1", "B": "two words", "C": "three words"}
    assert plan.workdir == "/app" and not plan.not_applied
    assert [(c.target, c.mode) for c in plan.copies] == [("/app/a.txt", 0o755), ("/app/b.txt", 0o600)]


def test_a_source_that_is_not_there_is_an_error_with_its_line() -> None:
    with pytest.raises(UserError, match=r"Dockerfile line 3: COPY nothing\.txt: no such file"):
        plan_dockerfile("FROM scratch\n\nCOPY nothing.txt .", CONTEXT, default_workdir="/app")


def test_here_documents_are_skipped_whole() -> None:
    steps = read_instructions("RUN <<A && <<'B'\nCOPY x\nA\nFROM y\nB\nWORKDIR /z")
    assert [(step.name, step.line) for step in steps] == [("RUN", 1), ("WORKDIR", 6)]


@settings(max_examples=examples(200))
@given(
    words=st.lists(
        st.sampled_from(
            [
                "COPY",
                "FROM",
                "ENV",
                "WORKDIR",
                "RUN",
                " ",
                "\n",
                "\\\n",
                "#",
                "<<E",
                "E",
                "a.txt",
                "*",
                "..",
                "/",
                "[",
                '"',
            ]
        )
    )
)
def test_any_text_is_planned_or_refused(words: list[str]) -> None:
    try:
        plan = plan_dockerfile("".join(words), CONTEXT, default_workdir="/app")
    except UserError:
        return
    for copied in plan.copies:
        assert copied.source in CONTEXT and copied.target.startswith("/") and ".." not in copied.target.split("/")
