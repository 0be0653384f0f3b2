"""Train an initial policy: seconds of supervised training on demonstrations, more than half of them wrong.

Without it, a model this small collapses to the most frequent answer, because right answers are too rare for
reinforcement learning. In seven of ten demonstrations the answer is one too high. A model that imitates them solves
about a third of the held-out problems; reinforcement learning does the rest.
"""

from __future__ import annotations

import random

import torch
from anyio.lowlevel import checkpoint
from torch import Tensor
from torch.nn import functional

from penstock.torch import Attention, positions_of

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
    """Problems that are not held out, each with an answer that is right or one too high."""

    def __init__(self, seed: int) -> None:
        self._problems = TrainingProblems(seed)
        self._random = random.Random(seed)  # noqa: S311 (no secret)
        self._next = FIRST

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the next `size` demonstrations: tokens [size, L] int64, right-padded, and a mask, true on answers."""
        rows = [self._row() for _ in range(size)]
        width = max(len(question) + len(answer) for question, answer in rows)
        tokens = torch.full((size, width), TOKENIZER.eos_id)
        mask = torch.zeros(size, width, dtype=torch.bool)
        for row, (question, answer) in enumerate(rows):
            length = len(question) + len(answer)
            tokens[row, :length] = torch.tensor(question + answer)
            mask[row, len(question) : length] = True
        return tokens, mask

    def _row(self) -> tuple[list[int], list[int]]:
        entry = self._problems[self._next]
        self._next += 1
        answer = int(entry["answer"]) + (self._random.random() < ONE_TOO_HIGH)
        return TOKENIZER.encode(entry["question"]), [*TOKENIZER.encode(str(answer)), TOKENIZER.eos_id]


async def warm_up(model: Transformer, seed: int, steps: int = STEPS) -> None:
    """Train `model` to imitate the demonstrations. Blocks the event loop; cancellation works between two steps."""
    demonstrations = Demonstrations(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / RAMP))
    model.train()
    for _ in range(steps):
        loss = imitation_loss(model, *demonstrations.batch(DEMONSTRATIONS))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        await checkpoint()


def imitation_loss(model: Transformer, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the cross-entropy of the tokens [B, L] where `mask` [B, L] is true, predicted at the previous position."""
    present = torch.ones_like(mask)
    logits = model(tokens, positions=positions_of(present), attend=Attention.causal(present))
    return functional.cross_entropy(logits[:, :-1][mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
