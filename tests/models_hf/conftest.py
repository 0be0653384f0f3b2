"""Folders of tiny models of transformers, with random weights, and of a tokenizer: made once, and never written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma 3": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma 2": ("Gemma2", {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}),
}
"""The class of each, and what it has besides grouped queries: tied and untied heads, windows of 4 tokens."""

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> ModelFolder:
    """Return the function that returns the folder of a family, with the tokenizer in it."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family.replace(" ", ""))
            write_model(family, made[family])
            for file in tokenizer_folder.iterdir():
                (made[family] / file.name).write_bytes(file.read_bytes())
        return made[family]

    return folder


def write_model(family: str, folder: Path) -> None:
    name, special = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **SMALL | {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None} | special
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config)
        for parameter in model.parameters():  # larger than the usual 0.02, so that tokens differ
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a byte-level tokenizer of at most 320 tokens with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["how many apples are there in two baskets of three apples"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
