"""Make the data and the model that config.yaml names, where they do not exist.

The model is a Qwen2 of 200,000 parameters with a tokenizer of its own. Supervised training teaches it the format and
the arithmetic. Seven of ten demonstrations have a slip, so the model solves about a third of the problems.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from penstock.chat import ChatFormat
from penstock.data import PromptDataset
from penstock.errors import InvalidConfig
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

WARM_UP_STEPS, DEMONSTRATIONS, LEARNING_RATE, RAMP = 450, 64, 3e-3, 30

SLIPS = {0: 10, 1: 13, -1: 5, 2: 5}
"""Errors of the last result of a demonstration, with their weights: seven of ten are wrong, most of them by 1."""


def prepare(config: RunConfig) -> None:
    """Write the problems to `config.data.path`, and the model into `config.model.path`, unless they exist."""
    data, folder = Path(config.data.path), Path(config.model.path)
    if data.name == DATA and not data.exists():
        _write_problems(data)
    if folder.name != MODEL:
        return
    if not data.exists():
        raise InvalidConfig(f"config: data.path: expected the file that the tokenizer is made from, got none at {data}")
    torch.set_num_threads(2)  # on every machine, for sums depend on it: the same seed trains the same model
    if not folder.exists():
        torch.manual_seed(config.seed)
        unfinished = folder.with_name(f"{folder.name}.{UNFINISHED}")
        _write_tokenizer(data, unfinished)
        _warmed_up(unfinished, config).save_pretrained(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(unfinished)  # another host was first: with the same seed it makes the same model


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


# -- supervised training -----------------------------------------------------------------------------------------------


def _warmed_up(folder: Path, config: RunConfig) -> Qwen2ForCausalLM:
    """Return a new model that imitates demonstrations."""
    tokenizer = PretrainedTokenizer(folder)
    model = Qwen2ForCausalLM(
        Qwen2Config(
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
    )
    demonstrations = _Demonstrations(tokenizer, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0)

    def rate(step: int) -> float:
        return min((step + 1) / RAMP, 1 - step / WARM_UP_STEPS)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(WARM_UP_STEPS):
        if step % 50 == 0:
            print(f"prepare: supervised step {step} of {WARM_UP_STEPS}", file=sys.stderr, flush=True)
        tokens, labels = demonstrations.batch(DEMONSTRATIONS)
        logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


class _Demonstrations:
    """Problems that are not kept apart for evaluation, with answers, most of which have a slip."""

    def __init__(self, tokenizer: PretrainedTokenizer, config: RunConfig) -> None:
        data = config.data
        self._tokenizer = tokenizer
        self._prompts = PromptDataset(
            data.path,
            prompt=data.prompt,
            evaluation=data.evaluation,
            seed=config.seed,
            chat=ChatFormat(tokenizer),
        )()
        self._random = random.Random(config.seed)  # noqa: S311 (no secret)
        self._next = 0

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the next `size` demonstrations: tokens [size, L], and labels [size, L], −100 outside the answers."""
        rows = [self._row() for _ in range(size)]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens = torch.full((size, width), self._tokenizer.eos_id)
        labels = torch.full((size, width), -100)
        for row, (prompt, answer) in enumerate(rows):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return tokens, labels

    def _row(self) -> tuple[list[int], list[int]]:
        prompt: Any = self._prompts.prompt(self._next)
        self._next += 1
        answer: str = prompt.meta["row"]["answer"]
        (slip,) = self._random.choices(list(SLIPS), list(SLIPS.values()))
        demonstrated = _with_slip(answer, slip)
        return list(prompt.content), [*self._tokenizer.encode(demonstrated), self._tokenizer.eos_id]


def _with_slip(answer: str, slip: int) -> str:
    """Return a worked answer whose last result is wrong by `slip`."""
    steps, _, number = answer.rpartition("\n#### ")
    result = int(number) + slip
    return f"{steps.rpartition('=')[0]}={result}\n#### {result}"
