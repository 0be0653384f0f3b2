"""A tiny model for the tokenizer of an environment of Atropos."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM


def write_model(folder: Path) -> None:
    """Write a model with random weights beside the tokenizer that is in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    # transformers 5 writes a class and a list that the older one of Atropos cannot read; both read this.
    settings = folder / "tokenizer_config.json"
    known = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    known.pop("extra_special_tokens", None)
    settings.write_text(json.dumps(known))
