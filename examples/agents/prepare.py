"""Make the rows and the model that a configuration names, where they do not exist.

The model is a Qwen2 of 80,000 parameters, whose tokens are characters. A run with the loss `sft`, of warm_up.yaml,
shows it the `transcript`s of its agent's module: conversations in which calls and answers are written as they should
be, and which seldom end well. What it does in the end, it has learned from its rewards.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from penstock.models import export
from penstock.runs import RunConfig

END, SPEAKS, UNKNOWN = "#", ":", "?"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*= "

TEMPLATE = (
    "{% for message in messages %}{{ '" + SPEAKS + "' if message.role == 'assistant' }}{{ message.content or '' }}"
    "" + END + "{% endfor %}{% if add_generation_prompt %}" + SPEAKS + "{% endif %}"
)

TRANSCRIPTS = 4000

WARM_UP = Path(__file__).with_name("warm_up.yaml")


def prepare(config: RunConfig) -> None:
    """Write the rows to `config.data.path`, and the model into `config.model.path`, unless they exist."""
    data, model = Path(config.data.path), Path(config.model.path)
    module: Any = import_module(data.stem)
    if not data.exists():
        rows = module.rows()
        random.Random(0).shuffle(rows)  # noqa: S311 (no secret)
        whole = data.with_name(f"{data.name}.unfinished")  # a file that a killed run had begun would be believed
        whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole.replace(data)
    if not model.exists():
        unfinished = model.with_name(f"{model.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        _write_untrained(unfinished / "untrained")
        _write_transcripts(unfinished / "transcripts.jsonl", module)
        shutil.copy(WARM_UP, unfinished)
        command = [sys.executable, "-m", "penstock", "run", WARM_UP.name, f"algorithm.steps={module.WARM_UP_STEPS}"]
        subprocess.run(command, cwd=unfinished, check=True)  # noqa: S603 (penstock itself)
        export(unfinished / "run", model)
        shutil.rmtree(unfinished)


def _write_untrained(folder: Path) -> None:
    """Write a model with random weights, and its tokenizer."""
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
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_transcripts(path: Path, module: Any) -> None:
    rng = random.Random(0)  # noqa: S311 (no secret)
    with path.open("w", encoding="utf-8") as file:
        for row in rng.choices(module.rows(), k=TRANSCRIPTS):
            messages = [{"role": role, "content": said} for role, said in module.transcript(row, rng)]
            file.write(json.dumps({"messages": messages}) + "\n")
