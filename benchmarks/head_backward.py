"""Learning with the gradients of the head in float32, and in bfloat16, from the same weights: reward and entropy.

    python -m benchmarks.head_backward [--steps 200] [--repeats 2]

Each repetition has a seed of its own. The model and the task of `examples/arithmetic_grpo.py`, in one process: every
batch is of the weights before it. Its vocabulary has 512 tokens, and a tile 64, so that the gradient of a hidden state
is a sum of eight products, each of them rounded in bfloat16. Processors without instructions for bfloat16
compute it too, more slowly.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from penstock import AdvantageNormalizer, Batcher, RewardBridge, SinkTrainer, SourceEnv, TrainBatch, source
from penstock.policies import SamplingParams
from penstock.torch import Attention, KVCache, Read, TorchPolicy, TorchTrainer
from penstock.weights import WeightPublisher

from .report import command_line, count, print_table, write_json

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from arithmetic.model import Seen, Shape, Transformer
from arithmetic.optimizer import annealed_adamw
from arithmetic.task import LONGEST_ANSWER, TrainingProblems
from arithmetic.tokenizer import CharacterTokenizer
from arithmetic.warm_up import warm_up

__all__ = ["main"]

VOCABULARY, NUMBERS_OF_A_TILE, SEQUENCES = 512, 2**16, 128

DTYPES: Mapping[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}

REPORTED = 25
"""Steps whose mean is a number of the table."""


class Reading(Transformer):
    """The transformer of the example, whose head is computed by tiles."""

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor,
        attend: Attention,
        cache: KVCache | None = None,
        read: Read | None = None,
    ) -> Any:
        """Return logits, or the result of `read`; see `CausalModel`."""
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        seen = Seen(attend.mask[:, None], cache)
        for layer in self.layers:
            x = layer(x, seen)
        hidden = self.norm(x)
        return self.logits(hidden) if read is None else read(hidden, self.logits.weight)


class Tokenizer(CharacterTokenizer):
    """The tokenizer of the example; further tokens are signs that no answer has."""

    __slots__ = ()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return super().decode([token if token < self.vocabulary else self.encode("=")[0] for token in ids])


def make_model() -> Reading:
    """Return the untrained model."""
    return Reading(Shape(vocabulary=VOCABULARY))


class Recorded:
    """A trainer whose rewards and entropies are kept."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer
        self.found: list[tuple[float, float]] = []

    def step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Take a step."""
        metrics = self._trainer.step(batch)
        self.found.append((float(batch.rewards.mean()), metrics["entropy"]))
        return metrics

    def weights(self) -> Any:
        """Return the weights to publish."""
        return self._trainer.weights()


def warm_model(seed: int) -> Reading:
    """Return the model after the supervised training of the example."""
    torch.manual_seed(seed)
    model = make_model()
    anyio.run(warm_up, model, seed)
    return model


async def learned(model: Reading, seed: int, dtype: torch.dtype | None, steps: int) -> list[tuple[float, float]]:
    """Return reward and entropy of each step of training `model`."""
    torch.manual_seed(seed)
    trainer = Recorded(TorchTrainer(model, optimizer=partial(annealed_adamw, steps=steps), head_backward_dtype=dtype))
    async with WeightPublisher(model) as publisher:
        env = SourceEnv(
            partial(TrainingProblems, seed),
            TorchPolicy(make_model, weights=publisher.url, seed=seed),
            Tokenizer(),
            sampling=SamplingParams(max_completion_tokens=LONGEST_ANSWER),
            concurrency=SEQUENCES,
        )
        pipeline = (
            source(env, max_lag=0)
            .then(RewardBridge.from_yaml(Path(__file__).parent.parent / "examples/arithmetic/reward.yaml"))
            .then(AdvantageNormalizer("grpo"))
            .then(Batcher(max_tokens=8192, sequences=SEQUENCES))
            .sink(SinkTrainer(trainer, publisher, max_steps=steps))
        )
        await pipeline.run()
    return trainer.found


def main() -> None:
    """Train, and print means of reward and entropy."""
    parser = command_line(__doc__, seconds=None, repeats=2)
    parser.add_argument("--steps", type=count, default=200)
    options = parser.parse_args()
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    with (
        patch("penstock._stages.losses.tiles.NUMBERS_OF_A_TILE", NUMBERS_OF_A_TILE),
        patch("torch.cpu._is_avx512_bf16_supported", lambda: True),
    ):
        for seed in range(options.repeats):
            warm = warm_model(seed)
            for name, dtype in DTYPES.items():
                found[seed, name] = anyio.run(learned, copy.deepcopy(warm), seed, dtype, options.steps)
                print(f"seed {seed}, {name}: {found[seed, name][-1]}", file=sys.stderr)
    ends = [*range(REPORTED, options.steps + 1, REPORTED)]
    for place, measured in enumerate(("reward", "entropy in nats")):
        rows = [
            [f"seed {seed}, {name}", *(f"{np.mean(values[end - REPORTED : end], axis=0)[place]:.3f}" for end in ends)]
            for (seed, name), values in found.items()
        ]
        head = ("", *(f"{end - REPORTED + 1}–{end}" for end in ends))
        print_table(Console(width=140), f"{measured}, means by steps", head, rows)
    write_json(options.json, {"rows": [[*key, values] for key, values in found.items()]})


if __name__ == "__main__":
    main()
