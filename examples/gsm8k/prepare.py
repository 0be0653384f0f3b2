"""Make the data and the model that config.yaml names, where they do not exist.

The model is a Qwen2 of 200,000 parameters with a tokenizer of its own. A run with the loss `sft`, of warm_up.yaml,
teaches it the format and the arithmetic. Seven of ten answers in its conversations have a slip, so the model solves
about a third of the problems.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.errors import InvalidConfig
from penstock.models import export
from penstock.policies import PretrainedTokenizer
from penstock.runs import RunConfig

__all__ = ["prepare"]

DATA, MODEL = "problems.jsonl", "model"
"""Names of the file and of the folder that are made; a path with another name is the user's own."""

UNFINISHED = f"{platform.node()}.{os.getpid()}"
"""Suffix of what is being made: samplers on other hosts may make the same, in the same folder."""

PROBLEMS = 6000
NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
THINGS = ("apples", "books", "coins", "figs", "pens", "shells", "stamps", "tickets")

TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

WARM_UP = Path(__file__).with_name("warm_up.yaml")

CONVERSATIONS = 28800
"""Each is imitated once."""

THREADS = 2
"""Threads of torch on every machine, for sums depend on it: the same seed trains the same model."""

SLIPS = {0: 10, 1: 13, -1: 5, 2: 5}
"""Errors of the last result of a conversation, with their weights: seven of ten are wrong, most of them by 1."""


def prepare(config: RunConfig) -> None:
    """Write the problems to `config.data.path`, and the model into `config.model.path`, unless they exist."""
    data, folder = Path(config.data.path), Path(config.model.path)
    if data.name == DATA and not data.exists():
        _write_problems(data)
    if folder.name != MODEL:
        return
    if not data.exists():
        raise InvalidConfig(f"config: data.path: expected the file that the tokenizer is made from, got none at {data}")
    torch.set_num_threads(THREADS)
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{UNFINISHED}")
        _write_untrained(data, unfinished / "untrained", config.seed)
        _write_conversations(unfinished, config)
        _warm_up(unfinished, config.seed)
        try:
            export(unfinished / "run", unfinished / "model").rename(folder)
        except OSError:
            if not folder.exists():  # else another host was first: with the same seed it makes the same model
                raise
        shutil.rmtree(unfinished)


def _write_problems(path: Path) -> None:
    """Write problems, each once, in GSM8K's format."""
    different = {problem.question: problem for problem in islice(_problems(seed=0), 2 * PROBLEMS)}
    rows = list(different.values())[:PROBLEMS]
    unfinished = path.with_name(f"{path.name}.{UNFINISHED}")
    unfinished.write_text("".join(json.dumps(row._asdict()) + "\n" for row in rows))
    unfinished.replace(path)


# -- problems ----------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A question, and its worked answer in GSM8K's format: steps of arithmetic, then `#### ` and the number."""

    question: str
    answer: str


def _problems(seed: int) -> Iterator[Problem]:
    """Yield word problems of one or two steps without end; some occur again."""
    numbers = random.Random(seed)  # noqa: S311 (no secret)
    while True:
        yield numbers.choice((_gains, _loses, _fills, _gains_and_loses))(numbers)


def _gains(numbers: random.Random) -> Problem:
    name, thing = numbers.choice(NAMES), numbers.choice(THINGS)
    had, more = numbers.randint(2, 9), numbers.randint(2, 9)
    question = f"{name} has {had} {thing} and gets {more} more. How many now?"
    return Problem(question, f"{had}+{more}={had + more}\n#### {had + more}")


def _loses(numbers: random.Random) -> Problem:
    name, thing = numbers.choice(NAMES), numbers.choice(THINGS)
    left, lost = numbers.randint(1, 9), numbers.randint(2, 9)
    question = f"{name} has {left + lost} {thing} and loses {lost}. How many now?"
    return Problem(question, f"{left + lost}-{lost}={left}\n#### {left}")


def _fills(numbers: random.Random) -> Problem:
    name, thing = numbers.choice(NAMES), numbers.choice(THINGS)
    bags, each = numbers.randint(2, 5), numbers.randint(2, 9)
    question = f"{name} fills {bags} bags with {each} {thing} each. How many in all?"
    return Problem(question, f"{bags}*{each}={bags * each}\n#### {bags * each}")


def _gains_and_loses(numbers: random.Random) -> Problem:
    name, thing = numbers.choice(NAMES), numbers.choice(THINGS)
    had, more = numbers.randint(2, 9), numbers.randint(2, 9)
    both = had + more
    lost = numbers.randint(1, min(9, both - 1))
    question = f"{name} has {had} {thing}, gets {more} and loses {lost}. How many now?"
    return Problem(question, f"{had}+{more}={both}, {both}-{lost}={both - lost}\n#### {both - lost}")


# -- model -------------------------------------------------------------------------------------------------------------


def _write_untrained(data: Path, folder: Path, seed: int) -> None:
    """Write a model with random weights, and its tokenizer."""
    _write_tokenizer(data, folder)
    tokenizer = PretrainedTokenizer(folder)
    torch.manual_seed(seed)
    shape = Qwen2Config(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_id,
    )
    Qwen2ForCausalLM(shape).save_pretrained(folder)


def _write_tokenizer(data: Path, folder: Path) -> None:
    """Train a byte-pair tokenizer on the problems, which splits numbers into digits."""
    tokenizer = Tokenizer(models.BPE())
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = map(json.loads, data.read_text().splitlines())
    texts = (f"user\n{row['question']}\nassistant\n{row['answer']}" for row in rows)
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast  # has no annotations
    saved = fast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)  # noqa: S106 (no secret)
    saved.save_pretrained(folder)


# -- warm-up -----------------------------------------------------------------------------------------------------------


def _write_conversations(folder: Path, config: RunConfig) -> None:
    """Write problems that are not kept apart for evaluation, with answers, most of which have a slip."""
    data, chat = config.data, ChatFormat(PretrainedTokenizer(folder / "untrained"))
    make = PromptDataset(data.path, prompt=data.prompt, evaluation=data.evaluation, seed=config.seed, chat=chat)
    prompts: Any = make()
    rows = [prompts.prompt(number).meta["row"] for number in range(len(prompts))]
    numbers = random.Random(config.seed)  # noqa: S311 (no secret)
    slips = numbers.choices(list(SLIPS), list(SLIPS.values()), k=CONVERSATIONS)
    with (folder / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for row, slip in zip(cycle(rows), slips, strict=False):
            asked = {"role": "user", "content": row[data.prompt]}
            answered = {"role": "assistant", "content": _with_slip(row["answer"], slip)}
            file.write(json.dumps({"messages": [asked, answered]}) + "\n")


def _with_slip(answer: str, slip: int) -> str:
    """Return a worked answer whose last result is wrong by `slip`."""
    steps, _, number = answer.rpartition("\n#### ")
    result = int(number) + slip
    return f"{steps.rpartition('=')[0]}={result}\n#### {result}"


def _warm_up(folder: Path, seed: int) -> None:
    """Run `penstock run warm_up.yaml` in `folder`."""
    shutil.copy(WARM_UP, folder)
    command = [sys.executable, "-m", "penstock", "run", WARM_UP.name, f"seed={seed}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    subprocess.run(command, cwd=folder, env=environment, check=True)  # noqa: S603 (penstock itself)
