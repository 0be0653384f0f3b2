"""Make the rows and the model that a configuration names, where they do not exist.

The model is a Qwen2 of 80,000 parameters, whose tokens are characters. It is warmed up for some seconds on the
`transcript`s of its agent's module: conversations that show how calls and answers are written, and seldom end well.
What it does in the end, it has learned from its rewards.
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
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*= "

TEMPLATE = (
    "{% for message in messages %}{{ '" + SPEAKS + "' if message.role == 'assistant' }}{{ message.content or '' }}"
    "" + END + "{% endfor %}{% if add_generation_prompt %}" + SPEAKS + "{% endif %}"
)

TRANSCRIPTS = 4000


def prepare(config: RunConfig) -> None:
    """Write the rows to `config.data.path`, and the model into `config.model.path`, unless they exist."""
    data, model = Path(config.data.path), Path(config.model.path)
    module: Any = import_module(data.stem)
    if not data.exists():
        rows = module.rows()
        random.Random(0).shuffle(rows)  # noqa: S311 (no secret)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not model.exists():
        _write_model(model, module)


def _write_model(folder: Path, module: Any) -> None:
    vocabulary = {each: number for number, each in enumerate(END + CHARACTERS + SPEAKS + UNKNOWN)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=characters, eos_token=END, pad_token=END, chat_template=TEMPLATE)
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
    model = Qwen2ForCausalLM(shape)
    _warm_up(model, tokenizer, module)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _warm_up(model: Any, tokenizer: Any, module: Any) -> None:
    """Train on what the assistant says in transcripts."""
    torch.set_num_threads(1)  # two are slower with so small a model
    rng = random.Random(0)  # noqa: S311 (no secret)
    texts = [module.transcript(row, rng) for row in rng.choices(module.rows(), k=TRANSCRIPTS)]
    ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    labels = torch.where(_said(ids, tokenizer), ids, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for rows in torch.randint(TRANSCRIPTS, (module.WARM_UP_STEPS, 64)):
        loss = model(ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _said(ids: Any, tokenizer: Any) -> Any:
    """Return whether each token is one of the assistant, the ends of its turns included."""
    said, speaking = torch.zeros_like(ids, dtype=torch.bool), torch.zeros(len(ids), dtype=torch.bool)
    speaks = tokenizer.convert_tokens_to_ids(SPEAKS)
    for place, column in enumerate(ids.T):
        said[:, place] = speaking
        speaking = (column == speaks) | (speaking & (column != tokenizer.eos_token_id))
    return said
