"""The lines of docs/losses.md under the names of the papers, against the papers' formulas, token by token in floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from tests.stages.losses.scoring import random

from penstock.losses import CISPO, GSPO, KL, AdvantageWeighted, ImportanceWeight, Loss, PPOClip, Scored


class Token(NamedTuple):
    """Log-probabilities under each policy, and the advantage."""

    pi: float
    behavior: float
    proximal: float
    ref: float
    advantage: float

    @property
    def ratio(self) -> float:
        """Return the ratio to the policy that sampled."""
        return math.exp(self.pi - self.behavior)


def sequences(given: Scored) -> list[list[Token]]:
    assert given.advantages is not None
    columns = (given.logprobs, given.behavior(), given.proximal(), given.reference(), given.advantages)
    tokens: Iterator[Token] = (Token(*row) for row in zip(*(each.tolist() for each in columns), strict=True))
    return [[next(tokens) for _ in range(length)] for length in given.lengths.tolist() if length]


def clip(ratio: float, low: float, high: float) -> float:
    return min(max(ratio, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, clip(ratio, low, high) * advantage)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def over_tokens(cost: Callable[[Token], float], batch: list[list[Token]]) -> float:
    return mean([cost(token) for sequence in batch for token in sequence])


def reinforce(batch: list[list[Token]]) -> float:
    return over_tokens(lambda t: -min(t.ratio, 1.3) * t.advantage * t.pi, batch)


def dapo(batch: list[list[Token]]) -> float:
    return over_tokens(lambda t: -surrogate(t.ratio, t.advantage, 0.8, 1.28), batch)


def grpo(batch: list[list[Token]]) -> float:
    def objective(t: Token) -> float:
        divergence = math.exp(t.ref - t.pi) - (t.ref - t.pi) - 1
        return surrogate(t.ratio, t.advantage, 0.8, 1.2) - 0.04 * divergence

    return -mean([mean([objective(t) for t in sequence]) for sequence in batch])


def dr_grpo(batch: list[list[Token]]) -> float:
    sums = [sum(surrogate(t.ratio, t.advantage, 0.8, 1.2) for t in sequence) for sequence in batch]
    return -mean(sums) / 4096


def gspo(batch: list[list[Token]]) -> float:
    def objective(sequence: list[Token]) -> float:
        ratio = math.exp(mean([t.pi - t.proximal for t in sequence]))
        return mean([surrogate(ratio, t.advantage, 1 - 3e-4, 1 + 4e-4) for t in sequence])

    return -mean([objective(sequence) for sequence in batch])


def cispo(batch: list[list[Token]]) -> float:
    return over_tokens(lambda t: -min(t.ratio, 1.5) * t.advantage * t.pi, batch)


def decoupled_ppo(batch: list[list[Token]]) -> float:
    def cost(t: Token) -> float:
        return -math.exp(t.proximal - t.behavior) * surrogate(math.exp(t.pi - t.proximal), t.advantage, 0.8, 1.2)

    return over_tokens(cost, batch)


def truncated(batch: list[list[Token]]) -> float:
    def cost(t: Token) -> float:
        weight = min(math.exp(t.proximal - t.behavior), 1.2)
        return -weight * surrogate(math.exp(t.pi - t.proximal), t.advantage, 0.8, 1.2)

    return over_tokens(cost, batch)


def icepop(batch: list[list[Token]]) -> float:
    def cost(t: Token) -> float:
        weight = math.exp(t.proximal - t.behavior)
        return -weight * (0.8 <= weight <= 1.2) * surrogate(math.exp(t.pi - t.proximal), t.advantage, 0.8, 1.2)

    return over_tokens(cost, batch)


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (AdvantageWeighted() * ImportanceWeight(high=1.3), reinforce),
        (PPOClip(clip_high=0.28), dapo),
        ((PPOClip() + 0.04 * KL("k3")).aggregated("seq-mean-token-mean"), grpo),
        (PPOClip().aggregated("seq-mean-token-sum-norm", longest=4096), dr_grpo),
        (GSPO().aggregated("seq-mean-token-mean"), gspo),
        (CISPO(highest=1.5), cispo),
        (PPOClip(old="proximal") * ImportanceWeight(high=math.inf), decoupled_ppo),
        (PPOClip(old="proximal") * ImportanceWeight(high=1.2), truncated),
        (PPOClip(old="proximal") * ImportanceWeight(low=0.8, high=1.2, beyond="mask"), icepop),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_named_loss_agrees_with_its_paper(loss: Loss, formula: Callable[[list[list[Token]]], float]) -> None:
    given = random(seed=1, lengths=(3, 6, 1, 4, 0))

    assert loss(given).loss.item() == pytest.approx(formula(sequences(given)), rel=1e-12)
