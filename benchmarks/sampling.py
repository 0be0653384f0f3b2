"""Sampling by TorchPolicy beside transformers' `generate`, with the same model: tokens a second.

    python -m benchmarks.sampling [--vocabulary 152000] [--threads 1]

A Qwen2 model with random weights, groups of 8 equal prompts, 64 rows at a time. Fixed: 64 completions of the same
length. Varied: completions of geometric lengths; `generate` computes each batch up to its longest completion. It
returns tokens; TorchPolicy returns tokens with log-probabilities. The two alternate.

Arriving: a group is requested whenever one of 8 is complete. Its rows join those that are being sampled; in batches,
with a cache whose rows cannot be joined, groups wait until all rows before them are done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.console import Console

from penstock import Worker
from penstock.models import HFModel
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy

from .report import command_line, median_of, print_table, write_json

__all__ = ["main"]

ROWS = 64

GROUP = 8

LONGEST = 4
"""Length of the longest completion of the varied ones, as a multiple of the mean."""

Work = Sequence[tuple[NDArray[np.int32], int]]
"""Prompts, with the length of each completion."""


def main() -> None:
    """Measure, and print the rates."""
    parser = command_line(__doc__, seconds=None, repeats=5)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8_000, 152_000])
    parser.add_argument("--tokens", type=int, default=64, help="length, or mean length, of a completion")
    parser.add_argument("--batches", type=int, default=1, help="number of varied completions, as a multiple of 64")
    parser.add_argument("--arriving", type=int, default=4, help="the same of arriving completions; 0 for none")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    each = [anyio.run(_measure, vocabulary, options) for vocabulary in options.vocabulary]
    rows, arriving = [row for found, _ in each for row in found], [row for _, found in each for row in found]
    title = f"{options.threads} threads, medians of {options.repeats}"
    console = Console()
    print_table(
        console, f"Tokens a second, {title}", ["", "generate", "TorchPolicy", "ratio"], [_line(*r) for r in rows]
    )
    print_table(
        console, f"Groups that arrive, {title}", ["", "in batches", "joining", "ratio"], [_line(*r) for r in arriving]
    )
    write_json(options.json, {"tokens_per_s": {n: m for n, *m in rows}, "arriving": {n: m for n, *m in arriving}})


def _line(name: str, one: Sequence[float], other: Sequence[float]) -> list[str]:
    ratio = statistics.median(other) / statistics.median(one)
    return [name, median_of(one), median_of(other), f"{ratio:.2f}"]


Measured = list[tuple[str, list[float], list[float]]]


async def _measure(vocabulary: int, options: argparse.Namespace) -> tuple[Measured, Measured]:
    """Return rates of `generate` and TorchPolicy; for groups that arrive rates and passes, in batches and joining."""
    with TemporaryDirectory() as folder:
        config = transformers.Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        auto: Any = transformers.AutoModelForCausalLM
        auto.from_config(config).save_pretrained(folder)
        model, in_batches = HFModel.from_pretrained(Path(folder)), _InBatches.from_pretrained(Path(folder))
    found: Measured = []
    arriving: Measured = []
    async with (
        TorchPolicy(lambda: model, vocabulary, max_rows=ROWS).open(Worker()) as engine,
        TorchPolicy(lambda: in_batches, vocabulary, max_rows=ROWS).open(Worker()) as engine_of_batches,
    ):
        for name, work in _works(options.tokens, options.batches).items():
            measured: tuple[list[float], list[float]] = ([], [])
            for _ in range(options.repeats + 1):  # the first is a warm-up
                measured[0].append(_rate(work, partial(_generate, model.module, work), time.perf_counter()))
                began = time.perf_counter()
                await _sample(engine, work)
                measured[1].append(_tokens(work) / (time.perf_counter() - began))
            found.append((f"{vocabulary:,} tokens, {name}", measured[0][1:], measured[1][1:]))
        if options.arriving:
            work = _varied(options.tokens, options.arriving)
            engines = (engine_of_batches, in_batches), (engine, model)
            both = [[await _groups(*each, work) for each in engines] for _ in range(options.repeats)]
            for place, name in enumerate(("tokens a second", "passes of the model")):
                one, other = ([pair[which][place] for pair in both] for which in (0, 1))
                arriving.append((f"{vocabulary:,} tokens, {name}", one, other))
    return found, arriving


class _InBatches(HFModel):
    """The same model, with caches whose rows cannot be joined."""

    def new_cache(self, batch: int, capacity: int) -> Any:
        return _Cache(super().new_cache(batch, capacity))


class _Cache:
    def __init__(self, cache: Any) -> None:
        self.states, self.keep = cache.states, cache.keep
        self._cache = cache

    @property
    def length(self) -> int:
        return int(self._cache.length)


def _works(tokens: int, batches: int) -> dict[str, Work]:
    return {"fixed": [(prompt, tokens) for prompt, _ in _varied(tokens, 1)], "varied": _varied(tokens, batches)}


def _varied(tokens: int, batches: int) -> Work:
    numbers = np.random.default_rng(0)
    prompts = numbers.integers(1, 7000, (ROWS * batches // GROUP, 32), np.int32).repeat(GROUP, axis=0)
    lengths = np.minimum(numbers.geometric(1 / tokens, len(prompts)), LONGEST * tokens)
    return list(zip(prompts, lengths.tolist(), strict=True))


def _tokens(work: Work) -> int:
    return sum(length for _, length in work)


def _rate(work: Work, call: Callable[[], None], began: float) -> float:
    call()
    return _tokens(work) / (time.perf_counter() - began)


async def _sample(engine: Any, work: Work) -> None:
    async with anyio.create_task_group() as tasks:
        for prompt, length in work:
            tasks.start_soon(engine.generate, [prompt], SamplingParams(max_completion_tokens=length))


async def _groups(engine: Any, model: HFModel, work: Work) -> tuple[float, float]:
    """Request each group of `work` when one before it is complete. Return tokens a second, and passes of the model."""
    groups, passes = iter([work[begin : begin + GROUP] for begin in range(0, len(work), GROUP)]), list[None]()

    async def take_turns() -> None:
        for group in groups:
            await _sample(engine, group)

    began = time.perf_counter()
    with model.register_forward_pre_hook(lambda *_: passes.append(None)):
        async with anyio.create_task_group() as tasks:
            for _ in range(ROWS // GROUP):
                tasks.start_soon(take_turns)
    return _tokens(work) / (time.perf_counter() - began), len(passes)


def _generate(module: Any, work: Work) -> None:
    for begin in range(0, len(work), ROWS):
        batch = work[begin : begin + ROWS]
        prompts = torch.from_numpy(np.stack([prompt for prompt, _ in batch])).long()
        lengths = torch.tensor([length for _, length in batch])

        def ended(tokens: Any, _: Any, lengths: Any = lengths, begin: int = prompts.shape[1]) -> Any:
            return tokens.shape[1] - begin >= lengths

        module.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=int(lengths.max()),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=transformers.StoppingCriteriaList([ended]),
        )


if __name__ == "__main__":
    main()
