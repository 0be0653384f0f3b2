"""The advantages of verl 0.9.1, SkyRL 0.3.0, TRL 1.16.0 and ROLL, written down from their formulas as plain loops.

Nothing is shared with penstock: one float after another, row by row. A row is the response to one prompt: what follows
the prompt, with the mask of what trains; rewards of tokens are those that the library would be given, with the reward
of the sequence already on its last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["FORMULAS", "Row"]

Advantages = list[list[float]]


@dataclass(frozen=True)
class Row:
    group: int
    mask: list[int]
    rewards: list[float]
    values: list[float]

    @property
    def score(self) -> float:
        return sum(self.rewards)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """With Bessel's correction, as `torch.std` has it."""
    m = mean(values)
    return math.sqrt(sum((x - m) ** 2 for x in values) / (len(values) - 1))


def scores_beside(rows: Sequence[Row], row: Row) -> list[float]:
    return [other.score for other in rows if other.group == row.group]


def broadcast(rows: Sequence[Row], per_row: Callable[[Row], float]) -> Advantages:
    return [[per_row(row) * trains for trains in row.mask] for row in rows]


def masked_whiten(rows: Sequence[Row], tokens: Advantages) -> Advantages:
    """(x − m) / √(variance + 1e-8) over the tokens that train."""
    kept = [x for row, xs in zip(rows, tokens, strict=True) for x, trains in zip(xs, row.mask, strict=True) if trains]
    m, scale = mean(kept), math.sqrt(deviation(kept) ** 2 + 1e-8)
    return [
        [(x - m) / scale * trains for x, trains in zip(xs, row.mask, strict=True)]
        for row, xs in zip(rows, tokens, strict=True)
    ]


# -- against the group -----------------------------------------------------------------------------------------------


def grpo(rows: Sequence[Row], *, epsilon: float, scaled: bool = True, lone_keeps: bool = True) -> Advantages:
    """(R − μ) / (σ + ε); of a group of one, R / (1 + ε) where it keeps its reward, else 0."""

    def one(row: Row) -> float:
        group = scores_beside(rows, row)
        if len(group) == 1:
            m, sigma = (0.0, 1.0) if lone_keeps else (row.score, 0.0)
        else:
            m, sigma = mean(group), deviation(group)
        return (row.score - m) / (sigma + epsilon if scaled else 1.0)

    return broadcast(rows, one)


def rloo(rows: Sequence[Row], *, lone_keeps: bool) -> Advantages:
    """R less the mean of the others."""

    def one(row: Row) -> float:
        others = scores_beside(rows, row)
        others.remove(row.score)
        return row.score - mean(others) if others else row.score * lone_keeps

    return broadcast(rows, one)


def opo(rows: Sequence[Row]) -> Advantages:
    """R less the mean of the group by length."""

    def one(row: Row) -> float:
        group = [other for other in rows if other.group == row.group]
        if len(group) == 1:
            return row.score
        return row.score - sum(sum(o.mask) * o.score for o in group) / sum(sum(o.mask) for o in group)

    return broadcast(rows, one)


def trl_batch(rows: Sequence[Row]) -> Advantages:
    """`scale_rewards="batch"`: μ of the group, σ of the batch."""
    sigma = deviation([row.score for row in rows])
    return broadcast(rows, lambda row: (row.score - mean(scores_beside(rows, row))) / (sigma + 1e-4))


def roll_norm(scores: Sequence[float], score: float) -> float:
    """`agentic_reward_norm`: 0 for one score alone, and where σ is 1e-6 or less."""
    if len(scores) == 1 or deviation(scores) <= 1e-6:
        return 0.0
    return (score - mean(scores)) / (deviation(scores) + 1e-6)


def roll_grpo(rows: Sequence[Row]) -> Advantages:
    return broadcast(rows, lambda row: roll_norm(scores_beside(rows, row), row.score))


def roll_batch(rows: Sequence[Row]) -> Advantages:
    return broadcast(rows, lambda row: roll_norm([other.score for other in rows], row.score))


# -- token by token --------------------------------------------------------------------------------------------------

GAMMA, LAMBDA = 0.9, 0.8


def verl_returns(row: Row) -> list[float]:
    """What does not train is passed over."""
    returns, running = [], 0.0
    for reward, trains in zip(reversed(row.rewards), reversed(row.mask), strict=True):
        running = reward + GAMMA * running if trains else running
        returns.append(running)
    return returns[::-1]


def skyrl_returns(row: Row) -> list[float]:
    """What does not train sets the sum back to 0."""
    returns, running = [], 0.0
    for reward, trains in zip(reversed(row.rewards), reversed(row.mask), strict=True):
        running = reward + GAMMA * running
        returns.append(running)
        running *= trains
    return returns[::-1]


def roll_returns(row: Row) -> list[float]:
    """What does not train earns nothing and is a step."""
    returns, running = [], 0.0
    for reward, trains in zip(reversed(row.rewards), reversed(row.mask), strict=True):
        running = reward * trains + GAMMA * running
        returns.append(running)
    return returns[::-1]


def verl_gae(row: Row) -> list[float]:
    """What does not train is passed over."""
    advantages, following, running = [], 0.0, 0.0
    for reward, value, trains in zip(reversed(row.rewards), reversed(row.values), reversed(row.mask), strict=True):
        if trains:
            running = reward + GAMMA * following - value + GAMMA * LAMBDA * running
            following = value
        advantages.append(running)
    return advantages[::-1]


def plain_gae(rewards: Sequence[float], values: Sequence[float]) -> list[float]:
    """Every token of the response is a step."""
    advantages, following, running = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + GAMMA * following - value + GAMMA * LAMBDA * running
        following = value
        advantages.append(running)
    return advantages[::-1]


def roll_gae(row: Row) -> list[float]:
    """Rewards and values are multiplied by the mask."""
    return plain_gae(
        [r * trains for r, trains in zip(row.rewards, row.mask, strict=True)],
        [v * trains for v, trains in zip(row.values, row.mask, strict=True)],
    )


def whitened(per_row: Callable[[Row], list[float]]) -> Callable[[Sequence[Row]], Advantages]:
    return lambda rows: masked_whiten(rows, [per_row(row) for row in rows])


def masked(per_row: Callable[[Row], list[float]]) -> Callable[[Sequence[Row]], Advantages]:
    return lambda rows: [[x * trains for x, trains in zip(per_row(r), r.mask, strict=True)] for r in rows]


FORMULAS: dict[tuple[str, str], Callable[[Sequence[Row]], Advantages]] = {
    ("verl", "grpo"): lambda rows: grpo(rows, epsilon=1e-6),
    ("verl", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False),
    ("verl", "rloo"): lambda rows: rloo(rows, lone_keeps=True),
    ("verl", "opo"): opo,
    ("verl", "reinforce++"): whitened(verl_returns),
    ("verl", "reinforce++-baseline"): lambda rows: masked_whiten(rows, grpo(rows, epsilon=0.0, scaled=False)),
    ("verl", "gae"): whitened(verl_gae),
    ("skyrl", "grpo"): lambda rows: grpo(rows, epsilon=1e-6),
    ("skyrl", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False),
    ("skyrl", "rloo"): lambda rows: rloo(rows, lone_keeps=False),
    ("skyrl", "reinforce++"): whitened(skyrl_returns),
    ("skyrl", "gae"): whitened(lambda row: plain_gae(row.rewards, row.values)),
    ("trl", "grpo"): lambda rows: grpo(rows, epsilon=1e-4, lone_keeps=False),
    ("trl", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False, lone_keeps=False),
    ("trl", "rloo"): lambda rows: rloo(rows, lone_keeps=False),
    ("trl", "batch"): trl_batch,
    ("roll", "grpo"): roll_grpo,
    ("roll", "dr_grpo"): lambda rows: grpo(rows, epsilon=0.0, scaled=False, lone_keeps=False),
    ("roll", "batch"): roll_batch,
    ("roll", "reinforce++"): whitened(roll_returns),
    ("roll", "reinforce++-baseline"): lambda rows: masked_whiten(
        rows, grpo(rows, epsilon=0.0, scaled=False, lone_keeps=False)
    ),
    ("roll", "gae"): masked(roll_gae),
}
"""By library and mode."""
