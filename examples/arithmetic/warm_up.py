"""Train an initial policy: seconds of supervised training on demonstrations, more than half of them wrong.

Without it, a model this small collapses to the most frequent answer, because right answers are too rare for
reinforcement learning. In seven of ten demonstrations the answer is one too high. A model that imitates them solves
about a third of the held-out problems; reinforcement learning does the rest.

It is a pipeline too: with the advantage 1 for each token of an answer, the loss is its cross-entropy.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import torch

from penstock import Batcher, SendChannel, SinkTrainer, TrajectoryGroup, source
from penstock.losses import AdvantageWeighted
from penstock.torch import TorchTrainer

from .model import Transformer
from .task import TrainingProblems
from .tokenizer import TOKENIZER

__all__ = ["Demonstrations", "warm_up"]

STEPS = 400
DEMONSTRATIONS = 128
"""Demonstrations in each step."""

ONE_TOO_HIGH = 0.72
"""Share of demonstrations whose answer is one too high."""

LEARNING_RATE = 3e-3
RAMP = 30
"""Steps until the full learning rate."""

FIRST = 500_000
"""Number of the first problem demonstrated: reinforcement begins at 0, and uses fewer."""


class Demonstrations:
    """A source of problems that are not held out, each with an answer that is right or one too high."""

    def __init__(self, seed: int) -> None:
        self._problems = TrainingProblems(seed)
        self._random = random.Random(seed)  # noqa: S311 (no secret)
        self._next = FIRST

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send one step's demonstrations after another, whose answers train."""
        for number in itertools.count():
            shown = [self.next() for _ in range(DEMONSTRATIONS)]
            masks = [[False] * len(question) + [True] * len(answer) for question, answer in shown]
            group = TrajectoryGroup.build(
                env="demonstrations",
                instance_id=str(number),
                sequences=[question + answer for question, answer in shown],
                loss_mask=masks,
                rewards=[0.0] * len(shown),
                advantages=[[float(trains) for trains in mask] for mask in masks],
            )
            await outbox.send(group)

    def next(self) -> tuple[list[int], list[int]]:
        """Return the tokens of the next question, and of its answer."""
        entry = self._problems[self._next]
        self._next += 1
        answer = int(entry["answer"]) + (self._random.random() < ONE_TOO_HIGH)
        return TOKENIZER.encode(entry["question"]), [*TOKENIZER.encode(str(answer)), TOKENIZER.eos_id]


async def warm_up(model: Transformer, seed: int, steps: int = STEPS) -> None:
    """Train `model` to imitate the demonstrations."""
    trainer = TorchTrainer(model, optimizer=_ramped_adamw, loss=AdvantageWeighted())
    batches = source(Demonstrations(seed)).then(Batcher(max_tokens=8192, sequences=DEMONSTRATIONS))
    await batches.sink(SinkTrainer(trainer, max_steps=steps)).run()


def _ramped_adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / RAMP))
    optimizer.register_step_post_hook(lambda *_: ramp.step())
    return optimizer
