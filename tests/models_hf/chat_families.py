"""Folders of tiny models whose end tokens are in the places where families of published models have them."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """What a family writes into its files."""

    template: str
    special: tuple[str, ...]
    """Its special tokens."""
    eos: str
    """`eos_token` of the tokenizer."""
    generation: tuple[str, ...] | str | None
    """`eos_token_id` of generation_config.json, as tokens; None without such a file."""
    ends: tuple[str, ...]
    """The tokens that end a completion."""
    config: tuple[str, ...] | str | None = None
    """`eos_token_id` of config.json."""


FAMILIES = {
    "gemma 3": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        ("<eos>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
    ),
    "phi 3": Family(
        PHI,
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "glm 4": Family(
        GLM,
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|endoftext|>",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "llama 3.1": Family(
        LLAMA,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ),
        "<|eot_id|>",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "qwen base": Family(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "<|endoftext|>",
        "<|endoftext|>",
        ("<|endoftext|>", "<|im_end|>"),
    ),
    "gpt-oss": Family(
        GPT_OSS,
        ("<|endoftext|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "config alone": Family(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<pad>"),
        "<eos>",
        None,
        ("<eos>", "<end_of_turn>", "<pad>"),
        config=("<eos>", "<pad>"),
    ),
}

TEXT = [*string.ascii_letters, *string.digits, " ", "\n", "?"]


def write_family(family: Family, folder: Path) -> Path:
    """Write a model whose end tokens are probable, its tokenizer and its template into `folder`; return it."""
    tokens = {token: number for number, token in enumerate([*TEXT, *family.special])}
    write_tokenizer(family, tokens, folder)
    torch.manual_seed(5)
    config = transformers.Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    model.lm_head.weight.data[[tokens[end] for end in family.ends]] *= 2
    model.save_pretrained(folder)
    _set_ends(folder / "config.json", family.config, tokens)
    _set_ends(folder / "generation_config.json", family.generation, tokens)
    if family.generation is None:
        (folder / "generation_config.json").unlink()
    return folder


def write_tokenizer(family: Family, tokens: dict[str, int], folder: Path) -> None:
    """Write a tokenizer of letters."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {token: number for token, number in tokens.items() if token in TEXT}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))  # noqa: S106 (no password)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "bos_token": family.special[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(family.template)


def _set_ends(path: Path, ends: Sequence[str] | str | None, tokens: dict[str, int]) -> None:
    config: dict[str, Any] = json.loads(path.read_text())
    config["eos_token_id"] = tokens[ends] if isinstance(ends, str) else ends and [tokens[end] for end in ends]
    path.write_text(json.dumps(config))
