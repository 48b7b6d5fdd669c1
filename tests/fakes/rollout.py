"""What tests of the rollout host share: a run file, a model folder, groups to generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_hpc.core.config import EnvironmentConfig, GroupConfig, GroupsConfig, ModelConfig, RolloutConfig, RunConfig
from miles_hpc.core.messages import GenerateGroup
from miles_hpc.core.types import GroupPurpose, SamplingParams
from miles_hpc.rollout.environments.shell import ShellEnvironment
from miles_hpc.rollout.session.tokenizer import ChatTokenizer, write_model_folder

__all__ = ["CHATML", "chatml_tokenizer", "group", "model_folder", "tiny_run"]

MOE_CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}

#: The template that many instruction-tuned models use, with a default system message.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_run(**rollout: Any) -> RunConfig:
    one = GroupConfig(nodes=1)
    return RunConfig(
        name="tiny",
        model=ModelConfig(config=dict(MOE_CONFIG), tokenizer="characters"),
        groups=GroupsConfig(trainer=one, rollout=one, sandbox=one),
        environment=EnvironmentConfig(name="shell", options={}),
        rollout=RolloutConfig(**rollout),
    )


def model_folder(folder: Path) -> ChatTokenizer:
    write_model_folder(tiny_run(), folder)
    return ChatTokenizer(folder)


def chatml_tokenizer(folder: Path, template: str = CHATML) -> ChatTokenizer:
    """A byte-level BPE tokenizer with a few merges and ChatML's control tokens."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the quick brown fox runs over the lazy dog and then some more of the same words again"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTokenizer(folder)


def group(
    group_id: int, *, attempt: int = 0, n_samples: int = 4, purpose: str = "train", **changes: Any
) -> GenerateGroup:
    values: dict[str, Any] = {
        "group_id": group_id,
        "attempt": attempt,
        "purpose": GroupPurpose(purpose),
        "prompt": ShellEnvironment().prompt(group_id, split=purpose),
        "n_samples": n_samples,
        "sampling": SamplingParams(max_new_tokens=16),
        "seed": group_id,
        "deadline_s": 60.0,
    }
    return GenerateGroup(**(values | changes))
