"""Text and tokens: the model folder's tokenizer and chat template, without torch or transformers.

A model folder holds `config.json`, `tokenizer.json` and a chat template (`chat_template.jinja`, or the key
`chat_template` of `tokenizer_config.json`), as Hugging Face writes them. Every role reads the run's own copy
(`RunPaths.model`), which `write_model_folder` makes once.

The built-in character tokenizer has one token per character, 64 ids in all, and a template of control tokens:

    <bos><ask>wtop 17<act>grep -l 17 *<end><obs>c<act>head -n1 c<end><obs>42<act>ans 42<end>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models

from checkpoints.publish import publish_bytes
from miles_hpc.core.config import RunConfig
from miles_hpc.core.errors import UserError
from miles_hpc.core.types import ChatMessage, ModelShape
from miles_hpc.rollout.session.chat_template import RENDERING_ERRORS, load_template

__all__ = [
    "ALPHABET",
    "CHARACTER_TEMPLATE",
    "ChatTokenizer",
    "character_tokenizer",
    "shape_of",
    "write_model_folder",
]

#: Control tokens of the character tokenizer; their ids are 0 to 6 in this order.
_CONTROL = ("<pad>", "<bos>", "<ask>", "<act>", "<end>", "<obs>", "<eos>")
_CHARACTER_VOCABULARY = 64

#: The default alphabet. It lacks '>', so that no text over it can spell a control token.
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n-<*|$.?:/!_=+,;'\"()"

#: Chat template of the character tokenizer. An assistant turn starts with <act> and ends with <end>.
CHARACTER_TEMPLATE = (
    "<bos>"
    "{%- for message in messages -%}"
    "{%- if message.role in ('user', 'system') -%}{{ '<ask>' + message.content }}"
    "{%- elif message.role == 'assistant' -%}{{ '<act>' + message.content + '<end>' }}"
    "{%- elif message.role == 'tool' -%}{{ '<obs>' + message.content }}"
    "{%- else -%}{{ raise_exception('unknown role ' + message.role) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<act>' }}{%- endif -%}"
)

# Stands for an assistant's text while a template is taken apart; no tokenizer or template uses it.
MARK = "\ue000\ue001\ue000"

# How tokens are spelled that models know as control tokens, whether or not tokenizer.json calls them special.
_BARRED = re.compile(r"<[|｜].+[|｜]>")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class ChatTokenizer:
    """Tokenizer and chat template of a model folder. Stateless after construction; use from one thread at a time.

    `vocab_size` counts ids including added tokens. `stop_ids` end an assistant turn. `control_tokens` are the special
    ones and those that look like it: DeepSeek's <｜User｜> opens a turn, but its tokenizer.json doesn't say so.
    `pad_id` falls back to the first stop id. Raises UserError when a file is missing or the template can't be used: it
    must be append-only, that is, adding messages must never change how earlier ones are rendered. `append_only` False
    leaves that check to the caller.
    """

    def __init__(self, folder: Path, *, append_only: bool = True) -> None:
        self.folder = folder
        self._tokenizer = _load_tokenizer(folder)
        settings = _read_json(folder / "tokenizer_config.json", optional=True)
        self._template_variables = {
            name: _token_text(settings.get(name)) or ""
            for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token")
        }
        self._template = load_template(folder, settings)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_tokens: tuple[str, ...] = tuple(
            t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special
        )
        self.control_tokens: tuple[str, ...] = tuple(
            t.content
            for t in self._tokenizer.get_added_tokens_decoder().values()
            if t.special or _BARRED.fullmatch(t.content)
        )
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.stop_ids: tuple[int, ...] = self._find_stop_ids(settings)
        pad = self._tokenizer.token_to_id(self._template_variables["pad_token"] or "")
        self.pad_id: int = self.stop_ids[0] if pad is None else pad
        if append_only:
            self._check_append_only()

    # ------------------------------------------------------------------------------------------- text and tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` exactly as it stands: nothing is added; spelled-out special tokens become their ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], *, special: bool = True) -> str:
        """Text of `ids`; with `special` False, special tokens are left out."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)
        return text

    def render(self, messages: Sequence[ChatMessage], *, generate: bool) -> str:
        """The conversation as the template writes it; with `generate`, an assistant turn is opened at the end.

        Raises UserError when the template refuses the messages.
        """
        return self.render_rows([{"role": m.role, "content": m.content} for m in messages], generate=generate)

    def render_rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        generate: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`render` for messages in OpenAI's shape, with descriptions of tools and further template variables."""
        given = {**self._template_variables, **(variables or {}), "tools": list(tools) or None}
        try:
            return self._template.render(messages=list(rows), add_generation_prompt=generate, **given)
        except RENDERING_ERRORS as error:
            roles = " ".join(str(row.get("role")) for row in rows)
            raise UserError(f"chat template of {self.folder} refuses messages [{roles}]: {error}") from error

    def plain(self, text: str) -> str:
        """`text` without spellings of control tokens: what an environment says must not open or close turns."""
        while (shorter := self._control.sub("", text)) != text:  # removing one may join another
            text = shorter
        return text

    # ------------------------------------------------------------------------------------------- construction

    def _find_stop_ids(self, settings: dict[str, Any]) -> tuple[int, ...]:
        found: list[int] = []
        eos = self._tokenizer.token_to_id(_token_text(settings.get("eos_token")) or "")
        if eos is not None:
            found.append(eos)
        listed = _read_json(self.folder / "generation_config.json", optional=True).get("eos_token_id")
        for token in listed if isinstance(listed, list) else [listed]:
            if isinstance(token, int) and token not in found:
                found.append(token)
        # What closes an assistant turn in the template counts as well.
        user = ChatMessage(role="user", content="a")
        closed = self.render([user, ChatMessage(role="assistant", content=MARK)], generate=False)
        closing = self.encode(closed.partition(MARK)[2])
        if closing and self._tokenizer.id_to_token(closing[0]) in self.special_tokens and closing[0] not in found:
            found.insert(0, closing[0])
        if not found:
            raise UserError(f"{self.folder}: no end-of-turn token: set eos_token in tokenizer_config.json")
        return tuple(found)

    def _check_append_only(self) -> None:
        talk = [ChatMessage(role="user", content="a")]
        before = self.render(talk, generate=True)
        for text in ("b", "c"):
            talk.append(ChatMessage(role="assistant", content=text))
            said = self.render(talk, generate=False)
            talk.append(ChatMessage(role="tool" if self.speaks("tool") else "user", content="d"))
            after = self.render(talk, generate=True)
            if not (said.startswith(before + text) and after.startswith(said)):
                raise UserError(
                    f"chat template of {self.folder} rewrites earlier messages (seen at assistant text {text!r}); "
                    "multi-turn records need one that only appends: put another chat_template.jinja into the folder"
                )
            before = after

    def speaks(self, role: str) -> bool:
        """Whether the template renders messages of this role."""
        talk = [
            ChatMessage(role="user", content="a"),
            ChatMessage(role="assistant", content="b"),
            ChatMessage(role=role, content=MARK),
        ]
        try:
            return MARK in self.render(talk, generate=True)
        except UserError:
            return False


# ------------------------------------------------------------------------------------------------ model folders


def character_tokenizer(alphabet: str = ALPHABET) -> Tokenizer:
    """A tokenizer with one token per character: 7 control tokens, the alphabet, then unused ids up to 64.

    Characters outside the alphabet are dropped. Raises UserError for an alphabet that repeats a character, holds
    '>' (with it, text could spell a control token) or has more than 57 characters.
    """
    room = _CHARACTER_VOCABULARY - len(_CONTROL)
    if len(set(alphabet)) != len(alphabet) or ">" in alphabet or not 0 < len(alphabet) <= room:
        raise UserError(f"alphabet {alphabet!r}: expected 1 to {room} different characters without '>'")
    tokens = [*_CONTROL, *alphabet]
    unused = [f"<unused{i}>" for i in range(_CHARACTER_VOCABULARY - len(tokens))]
    vocabulary = {token: i for i, token in enumerate([*tokens, *unused])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in [*_CONTROL, *unused]])
    return tokenizer


def write_model_folder(run: RunConfig, folder: Path) -> None:
    """Make the run's model folder: config.json, tokenizer.json, chat template. No weights. Idempotent, atomic per file.

    With `model.path`, the configuration is that folder's; with `model.config`, it is the run file's, and the
    vocabulary size and special token ids are filled in. `model.tokenizer` names where the tokenizer comes from.
    Raises UserError for a missing file or a vocabulary smaller than the tokenizer's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(run.model.path) if run.model.path else None
    if run.model.tokenizer == "characters":
        files = _character_files()
    else:
        named = Path(run.model.tokenizer) if run.model.tokenizer else source
        if named is None:
            raise UserError("model: no tokenizer: set model.tokenizer to 'characters' or a folder, or set model.path")
        files = {n: (named / n).read_bytes() for n in _TOKENIZER_FILES if (named / n).is_file()}
        if "tokenizer.json" not in files:
            raise UserError(f"model: {named} has no tokenizer.json: name a Hugging Face folder with a fast tokenizer")
    if source is not None:
        config = _read_json(source / "config.json")
    else:
        if "model_type" not in run.model.config:
            raise UserError("model: neither model.path nor model.config.model_type is set")
        config = dict(run.model.config)
    for name, data in files.items():
        _publish_if_changed(folder / name, data)
    if source is None:
        tokenizer = ChatTokenizer(folder)
        config.setdefault("vocab_size", tokenizer.vocab_size)
        config.setdefault("pad_token_id", tokenizer.pad_id)
        config.setdefault("eos_token_id", tokenizer.stop_ids[0])
        if config["vocab_size"] < tokenizer.vocab_size:
            raise UserError(
                f"model.config.vocab_size={config['vocab_size']}: the tokenizer has {tokenizer.vocab_size} ids"
            )
    _publish_if_changed(folder / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def shape_of(folder: Path) -> ModelShape:
    """What other roles need to know of the model, read from its config.json.

    MoE layers follow transformers' definitions: Qwen2/Qwen3-MoE have experts in layer i unless i is in
    mlp_only_layers or (i + 1) % decoder_sparse_step != 0; DeepSeek from first_k_dense_replace on, every
    moe_layer_freq-th layer; Mixtral, OLMoE and GPT-OSS in every layer. Raises UserError for other MoE models.
    """
    path = folder / "config.json"
    config = _read_json(path)
    config = config.get("text_config", config)
    try:
        vocabulary, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        layers = int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: expected whole numbers vocab_size, max_position_embeddings, num_hidden_layers") from (
            error
        )
    kind = str(config.get("model_type", ""))
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    top_k = int(config.get("num_experts_per_tok") or config.get("top_k_experts") or 0)
    if experts == 0:
        return ModelShape(vocab_size=vocabulary, max_position_embeddings=positions)
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        sparse_step = int(config.get("decoder_sparse_step", 1))
        dense = set(config.get("mlp_only_layers") or ())
        moe = [i for i in range(layers) if i not in dense and sparse_step > 0 and (i + 1) % sparse_step == 0]
    elif kind in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        first, every = int(config.get("first_k_dense_replace", 0)), int(config.get("moe_layer_freq", 1))
        moe = [i for i in range(layers) if i >= first and i % every == 0]
    elif kind in ("mixtral", "olmoe", "gpt_oss"):
        moe = list(range(layers))
    else:
        raise UserError(f"{path}: model_type {kind!r} has {experts} experts in layers that this project can't tell")
    if top_k <= 0:
        raise UserError(f"{path}: {experts} experts but no num_experts_per_tok")
    return ModelShape(
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        moe_layers=tuple(moe),
        n_experts=experts,
        top_k=top_k,
    )


# ------------------------------------------------------------------------------------------------ details


def _character_files() -> dict[str, bytes]:
    settings = {"bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<pad>", "model_max_length": 1 << 20}
    return {
        "tokenizer.json": character_tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        "chat_template.jinja": CHARACTER_TEMPLATE.encode(),
    }


def _publish_if_changed(path: Path, data: bytes) -> None:
    if not path.is_file() or path.read_bytes() != data:
        publish_bytes(path, data)


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file: expected a Hugging Face folder with a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if optional:
            return {}
        raise UserError(f"{path}: no such file: expected a Hugging Face folder with it")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
