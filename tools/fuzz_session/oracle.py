"""What prompts must be, token by token, from transformers' own tokenizer and rendering: nothing of ours is asked.

    first prompt    all messages rendered, an assistant turn opened, tokenised
    later prompts   what was seen and sampled ─▶ junction ─▶ what the template puts behind the last assistant turn,
                    taken from two renderings of the whole conversation, with and without the new messages

Of our side only data is used: what `ChatFamily` says of a family. Clients' texts are cleaned here by plain replacement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from miles_hpc.core.errors import UserError
from miles_hpc.rollout.session.template import ChatFamily

__all__ = ["WORDS", "Impossible", "Oracle"]

_SAID = "said 0"
#: What texts are made of.
WORDS = ("then", "the tool", "user", '{"a": 1}', "\n\n", "  ", "a file", "naïve", "日本", "😀", "<think>", "12345")
_SPLIT_TEXTS = 2000
_COMPARED = 50  # of so many renderings, one is compared with transformers' own
_SAMPLE_TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


class Impossible(ValueError):
    """The template refuses this conversation: the session must as well, with 400."""


class Oracle:
    """One model folder, read by transformers. Raises UserError without that package."""

    def __init__(self, folder: Path, family: ChatFamily) -> None:
        try:
            from transformers import AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise UserError(f"prompts are compared with transformers': {error}: install the extra 'train'") from error
        logging.set_verbosity_error()
        self.family = family
        self._hugging_face = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._tokenizer = self._hugging_face.backend_tokenizer
        self._source = self._hugging_face.get_chat_template()
        self._fast = _unguarded(self._source)
        self._rendered = 0
        added = self._tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        self.control = [t.content for i, t in added.items() if i in special or re.match(r"<[|｜].*[|｜]>$", t.content)]
        self._starts = {text[0] for text in self.control}
        self.ordinary = [i for i in range(len(self._hugging_face)) if i not in special]
        self.trims = {self.encode(text)[0] for text in family.trims}
        self.stops = self.trims | self._stops(folder, special)
        ids = self.encode(self._render(_SAMPLE_TALK, [], True))
        written = {added[i].content for i in ids if i in added}
        #: Control tokens that the template writes: what a client would spell to open or close turns.
        self.spelled = [text for text in self.control if text in written]
        #: Whether a conversation can go on after a system message behind a user's.
        self.takes_tools = self._takes([_SAMPLE_TALK[1], {"role": "tool", "content": "t"}])
        self.takes_system = self._takes([{"role": "system", "content": "s"}, *_SAMPLE_TALK[1:]])
        self.shows_calls = {has_content: self._shows_calls(has_content) for has_content in (False, True)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def canonical(self, ids: Sequence[int]) -> bool:
        """Whether the tokenizer would split the text of these tokens in the same way."""
        return self.encode(self.decode(ids)) == list(ids)

    def split_texts(self, rng: Random) -> list[list[int]]:
        """Texts that a model might write, cut at random and tokenised piece by piece."""
        made = []
        for _ in range(_SPLIT_TEXTS):
            words = rng.choices(WORDS, k=rng.randint(1, 4))
            text = " ".join([*words, f'<tool_call>{{"name": "run{rng.random()}"}}'])
            cuts = sorted({0, len(text), *(rng.randint(0, len(text)) for _ in range(rng.randint(0, 4)))})
            made.append([i for start, end in pairwise(cuts) for i in self.encode(text[start:end])])
        return made

    def plain(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as it must be rendered: nothing spelled out, no content as "" (null where the family says so)."""
        made: dict[str, Any] = self._clean({**message, "content": message.get("content") or ""})
        if made.get("tool_calls") and self.family.calls_alone:
            calls = [
                {**c, "function": {**c["function"], "arguments": self._clean(json.dumps(c["function"]["arguments"]))}}
                for c in message["tool_calls"]
            ]
            made |= {"tool_calls": calls, "content": made["content"] or None}
        return made

    def first(self, talk: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[int]:
        """Tokens of a first prompt. Raises Impossible."""
        for message in talk:
            if message.get("tool_calls") and not self.shows_calls[bool(message["content"])]:
                raise Impossible("the template leaves calls out")
        return self.encode(self._render(talk, tools, True))

    def after(self, seen: list[int], talk: Sequence[dict[str, Any]], n_before: int, tools: Sequence[Any]) -> list[int]:
        """Tokens of a prompt that goes on from `seen`, all that was seen and sampled for the first `n_before` messages
        of `talk`; the last of these is the assistant's. Raises Impossible.
        """
        for message in talk[n_before:]:
            if message.get("tool_calls") and not self.shows_calls[bool(message["content"])]:
                raise Impossible("the template leaves calls out")
        before: list[Any] = list(talk[: n_before - 1])
        if self.family.rounds_alike:
            before = [_without_calls(message) for message in before if message["role"] != "tool"]
        # What was said last is replaced by a word of no meaning: only what stands behind it is compared.
        before.append(talk[n_before - 1] | {"content": _SAID})
        shorter = self._render(before, tools, False).rpartition(_SAID)[2]
        whole = self._render([*before, *talk[n_before:]], tools, True).rpartition(_SAID)[2]
        if not whole.startswith(shorter):
            raise AssertionError(f"the template isn't append-only: {shorter!r:.200}, {whole!r:.200}")
        return self._join(seen, self.encode(self._closing(shorter) + whole[len(shorter) :]))

    # ------------------------------------------------------------------------------------------- details

    def _join(self, seen: list[int], ids: list[int]) -> list[int]:
        """The junction, as the table of session/template.py promises it."""
        last = seen[-1]
        if last in self.trims:
            return [*seen, *ids[1:]] if ids[0] == last else [*seen[:-1], *ids]
        if last in self.stops and ids[0] in self.stops - self.trims:
            return [*seen, *ids[1:]]
        return [*seen, *ids]

    def _closing(self, text: str) -> str:
        """From the last token that ends turns on; nothing where the next turn's opening is what ends one."""
        starts = [text.rfind(self.decode([stop])) for stop in self.stops]
        return text[max(starts) :] if max(starts) >= 0 else ""

    def _render(self, talk: Sequence[dict[str, Any]], tools: Sequence[Any], generate: bool) -> str:
        from jinja2 import TemplateError

        given = {**self._hugging_face.special_tokens_map, **self.family.variables, "tools": list(tools) or None}
        try:
            text = str(self._fast.render(messages=list(talk), add_generation_prompt=generate, **given))
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise Impossible(str(error)) from error
        self._rendered += 1
        if self._rendered % _COMPARED == 1:
            self._compare(text, talk, tools, generate)
        return text

    def _compare(self, text: str, talk: Sequence[dict[str, Any]], tools: Sequence[Any], generate: bool) -> None:
        """With what transformers makes of it: what apply_chat_template calls in the end. That one drops null fields
        first, which some templates ask for.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, _ = render_jinja_template(
            conversations=[list(talk)],
            tools=list(tools) or None,
            chat_template=self._source,
            add_generation_prompt=generate,
            **{**self._hugging_face.special_tokens_map, **self.family.variables},
        )
        if texts[0] != text:
            raise AssertionError(f"jinja2 renders {text!r:.300}, transformers {texts[0]!r:.300}")

    def _stops(self, folder: Path, special: set[int]) -> set[int]:
        stops = {self._hugging_face.eos_token_id}
        listed = folder / "generation_config.json"
        if listed.exists():
            named = json.loads(listed.read_text())["eos_token_id"]
            stops |= set(named) if isinstance(named, list) else {named}
        closed = self._render([_SAMPLE_TALK[0], {"role": "assistant", "content": _SAID}], [], False)
        return stops | {i for i in self.encode(closed.rpartition(_SAID)[2])[:1] if i in special}

    def _takes(self, more: list[dict[str, Any]]) -> bool:
        try:
            self._render([_SAMPLE_TALK[0], *more], [], True)
        except Impossible:
            return False
        return True

    def _shows_calls(self, has_content: bool) -> bool:
        call = {"id": "c", "type": "function", "function": {"name": "NAME_OF_IT", "arguments": {"a": 1}}}
        message = {"role": "assistant", "content": "a" if has_content else "", "tool_calls": [call]}
        return "NAME_OF_IT" in self._render([_SAMPLE_TALK[0], self.plain(message)], [], False)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            text, before = value, ""
            while text != before and not self._starts.isdisjoint(text):
                before = text
                for spelled in self.control:
                    text = text.replace(spelled, "")
            return text
        if isinstance(value, dict):
            return {self._clean(k): self._clean(v) for k, v in value.items()}
        return [self._clean(v) for v in value] if isinstance(value, list) else value


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": message["content"] or ""}


def _unguarded(source: str) -> Any:
    """The template in an environment as transformers', but for its sandbox, which would take most of the time."""
    from jinja2 import Environment, TemplateError

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)
