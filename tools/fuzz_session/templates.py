"""Tokenizers and chat templates to fuzz sessions with: five styles over a small byte-level BPE, and the built-in one.

| style | ends an assistant turn | tools |
|---|---|---|
| `characters` | `<end>` | none; one token per character |
| `chatml` | `<|im_end|>`, then a newline | listed in the system message; calls and results as tagged JSON, results in one user turn |
| `headers` | `<|eot_id|>`; a turn of calls `<|eom_id|>` | a turn of calls shows nothing else; results name their call's function |
| `thinking` | as `chatml`; shows an assistant's thoughts only after the last user message | as `chatml` |
| `openers` | nothing: what opens the next turn is sampled | results behind a token of their own |
| `rounds` | `<|end|>` | calls shown without content only; a mark before the first results of a conversation, not later |

The tokens that open turns in `rounds` aren't special ones to its tokenizer.
"""  # noqa: E501

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from miles_hpc.rollout.session.template import CHAT_FAMILIES, ChatFamily, HuggingFaceTemplate
from miles_hpc.rollout.session.tokenizer import CHARACTER_TEMPLATE, ChatTokenizer, character_tokenizer

__all__ = ["STYLES", "folder_template", "style_folder", "style_template"]

_CHATML = """\
{%- if messages[0].role == 'system' or tools -%}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'Act.') -}}
{%- for tool in tools or [] -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif not (loop.first and m.role == 'system') -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.reasoning_content -%}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
{{- '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_THINKING = (
    "{%- set at = namespace(user=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set at.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    + _CHATML.replace(
        "{%- if m.reasoning_content -%}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}",
        "{%- if m.role == 'assistant' and loop.index0 > at.user and (loop.last or m.reasoning_content) -%}"
        "{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}",
    )
)

_HEADERS = """\
{{- bos_token -}}
{%- set seen = namespace(names={}) -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if m.tool_call_id not in seen.names -%}{{- raise_exception('no call ' ~ m.tool_call_id) -}}{%- endif -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + seen.names[m.tool_call_id] + ': ' + m.content -}}
{{- '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
{%- if not m.tool_calls -%}{{- m.content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- set seen.names = dict(seen.names, **{call.id: call.function.name}) -%}
{{- '<|python_tag|>' + {'name': call.function.name, 'parameters': call.function.arguments} | tojson -}}
{%- endfor -%}
{{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

_OPENERS = """\
[gMASK]<sop>
{%- if tools -%}<|system|>
{% for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- '<|observation|>\\n' + m.content -}}
{%- else -%}{{- '<|' + m.role + '|>\\n' + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\\n' + call.function.name + call.function.arguments | tojson -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

_ROUNDS = """\
{{- bos_token -}}
{%- set at = namespace(round=0, in_results=false) -%}
{%- for m in messages if m.role == 'system' -%}{{- m.content + '\\n' -}}{%- endfor -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'tool' -%}
{{- ('<|results|>' if at.round == 0 else '\\n') + '<|result|>' + m.content -}}
{%- set at.round = 1 -%}{%- set at.in_results = true -%}
{%- else -%}
{%- if m.role == 'assistant' and m.content is none -%}
{{- '<|assistant|>' -}}
{%- for call in m.tool_calls -%}{{- '<|call|>' + call.function.name + call.function.arguments -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- elif m.role == 'assistant' -%}
{{- ('' if at.in_results else '<|assistant|>') + m.content + '<|end|>' -}}
{%- else -%}
{{- '<|user|>' + m.content -}}
{%- endif -%}
{%- set at.in_results = false -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not at.in_results -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

#: Style: (template, control tokens, the first of them end turns, family).
STYLES: dict[str, tuple[str, tuple[str, ...], int, ChatFamily]] = {
    "characters": (CHARACTER_TEMPLATE, (), 0, CHAT_FAMILIES["default"]),
    "chatml": (_CHATML, ("<|im_end|>", "<|endoftext|>", "<|im_start|>"), 1, CHAT_FAMILIES["default"]),
    "thinking": (_THINKING, ("<|im_end|>", "<|endoftext|>", "<|im_start|>"), 1, CHAT_FAMILIES["qwen3"]),
    "headers": (
        _HEADERS,
        ("<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        2,
        CHAT_FAMILIES["default"],
    ),
    "openers": (
        _OPENERS,
        ("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
        2,
        CHAT_FAMILIES["glm47"],
    ),
    "rounds": (
        _ROUNDS,
        ("<|end|>", "<|begin_of_text|>", "<|user|>", "<|assistant|>", "<|results|>", "<|result|>", "<|call|>"),
        1,
        CHAT_FAMILIES["deepseek_v3"],
    ),
}
_SPECIAL_IN_ROUNDS = 2  # of its control tokens


def style_folder(style: str, folder: Path) -> tuple[Path, ChatFamily]:
    """Write a model folder of that style to `folder`; its family with it."""
    template, control, n_stops, family = STYLES[style]
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    if style == "characters":
        tokenizer = character_tokenizer()
        settings |= {"bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<pad>"}
    else:
        tokenizer = _byte_level(control, n_special=_SPECIAL_IN_ROUNDS if style == "rounds" else len(control))
        stops = [tokenizer.token_to_id(token) for token in control[:n_stops]]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        settings["eos_token"] = control[0]
        if "<|begin_of_text|>" in control:
            settings["bos_token"] = "<|begin_of_text|>"
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, family


def style_template(style: str, folder: Path) -> tuple[ChatTokenizer, HuggingFaceTemplate]:
    """That model folder's tokenizer, and what a session asks of it."""
    return folder_template(*style_folder(style, folder))


def folder_template(
    folder: Path, family: ChatFamily = CHAT_FAMILIES["default"]
) -> tuple[ChatTokenizer, HuggingFaceTemplate]:
    """A model folder's tokenizer, and what a session asks of it. Raises UserError when no conversation could go on."""
    tokenizer = ChatTokenizer(folder, append_only=False)
    template = HuggingFaceTemplate(tokenizer, family)
    template.check()
    return tokenizer, template


def _byte_level(control: tuple[str, ...], *, n_special: int) -> Tokenizer:
    """Merges enough that most texts can be split in many ways."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = (
        'the tool said that {"path": "file", "text": 12.5} is a call\n and a user wants another answer, then it ends'
    )
    text = [words, words.replace(" ", "  "), words.upper(), words[::-1]] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control[:n_special]])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in control[n_special:]])
    return tokenizer
