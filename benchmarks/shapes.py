"""Models of transformers by the shape of a known one, with random weights: no weights are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.models import HFModel, LoRA

__all__ = ["SHAPES", "make_model", "make_module"]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""The arguments of a `Qwen2Config`, by the name of the model; `tiny` is for tests."""


def make_model(
    shape: str, folder: Path, device: str, *, base: torch.dtype = torch.float32, lora: LoRA | None = None
) -> HFModel:
    """Return a model of `shape` on `device`, with parameters of `base`; its configuration is written into `folder`."""
    return HFModel(make_module(shape, folder, device, base), folder, lora).to(device)


def make_module(shape: str, folder: Path, device: str, dtype: torch.dtype) -> Any:
    """Return the same model as transformers has it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 (takes seconds to import)

    config = Qwen2Config(max_position_embeddings=32768, use_cache=False, **SHAPES[shape])
    config.save_pretrained(folder)
    with torch.device(device):
        return Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")  # type: ignore[no-untyped-call]  # noqa: SLF001 (its only name)
