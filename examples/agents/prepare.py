"""Make the rows and the model that the configurations name, where they do not exist.

The model is a Qwen2 of 80,000 random parameters, whose tokens are letters and digits: what it can do in the end, it has
learned from its agent. The rows are the function `rows` of the module with the name of the file.
"""

from __future__ import annotations

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from penstock.runs import RunConfig

END, SPEAKS, UNKNOWN = "#", ":", "?"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "

TEMPLATE = (
    "{% for message in messages %}{{ message.content or '' }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}" + SPEAKS + "{% endif %}"
)


def prepare(config: RunConfig) -> None:
    """Write the rows to `config.data.path`, and the model into `config.model.path`, unless they exist."""
    data, model = Path(config.data.path), Path(config.model.path)
    if not data.exists():
        rows = import_module(data.stem).rows()
        random.Random(0).shuffle(rows)  # noqa: S311 (no secret)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not model.exists():
        _write_model(model)


def _write_model(folder: Path) -> None:
    vocabulary = {letter: number for number, letter in enumerate(END + LETTERS + SPEAKS + UNKNOWN)}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=letters, eos_token=END, pad_token=END, chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,  # with the usual 0.02 so small a model begins to learn later
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)
