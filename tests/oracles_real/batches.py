"""Batches in two layouts: rectangles [B, L] with a mask, as of the peers, and packed tokens, as of penstock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tests.stages.losses.scoring import scored
from torch import Tensor

from penstock.losses import Loss, Scored

__all__ = ["BATCHES", "GROUPS", "LONGEST", "Batch", "Peer", "agree", "chosen", "differentiated", "ours", "shifted"]

TOKENS = (5, 9, 1, 0, 7, 4, 1, 6)
"""Tokens of each sequence that train; the fourth has none."""

GROUPS = (0, 0, 0, 1, 1, 2, 3, 3)

LONGEST = 12

PADDING = -0.7
"""The log-probability of tokens that do not train: finite, for most peers multiply by the mask."""


@dataclass(frozen=True)
class Batch:
    """Sequences with tokens that do not train between and behind those that do; all [B, L] float64."""

    new: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    """[B, L] bool."""

    @property
    def floats(self) -> Tensor:
        """Return the mask as float64."""
        return self.mask.double()

    @property
    def sequences(self) -> int:
        """Return B."""
        return len(self.mask)

    def packed(self, new: Tensor) -> Scored:
        """Return the tokens that train, with `new` [T] as log-probabilities of the policy."""
        groups = torch.tensor(GROUPS[: self.sequences])
        counts = torch.bincount(groups, self.mask.sum(1))
        columns: dict[str, Any] = {
            "behavior_logprobs": self.rollout[self.mask],
            "proximal_logprobs": self.old[self.mask],
            "ref_logprobs": self.reference[self.mask],
            "group_tokens": counts.long()[groups][:, None].expand_as(self.mask)[self.mask],
            "loss_groups": int((counts > 0).sum()),
        }
        return scored(new, self.advantages[self.mask], lengths=self.mask.sum(1).tolist(), **columns)


def made(seed: int, spread: float, *, by_token: bool = True, zero: bool = False) -> Batch:
    """Return a batch whose log-ratios have this deviation; some of ±19.5 if it is above 5."""
    random = np.random.default_rng(seed)
    shape = (len(TOKENS), LONGEST)
    mask = np.zeros(shape, np.bool_)
    for row, tokens in zip(mask, TOKENS, strict=True):
        row[random.choice(LONGEST, tokens, replace=False)] = True

    def away(center: NDArray[np.float64]) -> NDArray[np.float64]:
        moved: NDArray[np.float64] = np.minimum(
            center + np.clip(spread * random.standard_normal(shape), -19.5, 19.5), -1e-4
        )
        return moved

    rollout = -random.gamma(0.7, 1.5, shape) - 20 * (random.random(shape) < 0.5) * (spread > 5)
    old = away(rollout)
    advantages = random.standard_normal(shape if by_token else (shape[0], 1)) * np.ones(shape)
    advantages[4] = 0.0
    columns = {"new": away(old), "old": old, "rollout": rollout, "reference": away(old)}
    columns["advantages"] = advantages * (not zero)
    padded = {name: torch.tensor(np.where(mask, each, PADDING)) for name, each in columns.items()}
    return Batch(mask=torch.tensor(mask), **padded)


def shifted(log_ratio: float, advantages: Sequence[float] = (-1.0,)) -> Batch:
    """Return one sequence of three tokens, whose log-ratio to every other policy is the same."""
    new = torch.full((1, 3), min(log_ratio, 0.0) - 1.0, dtype=torch.float64)
    of_tokens = torch.tensor(advantages, dtype=torch.float64).expand(1, 3)
    other = new - log_ratio
    return Batch(new, other, other, other, of_tokens, torch.ones(1, 3, dtype=torch.bool))


BATCHES: Mapping[str, Batch] = {
    "near": made(1, 0.05),
    "apart": made(2, 0.6),
    "far": made(3, 12.0),
    "one advantage": made(4, 0.4, by_token=False),
    "no advantage": made(5, 0.4, zero=True),
}
"""By name; advantages differ by token, and are 0 in one sequence, unless the name says otherwise."""

Peer: TypeAlias = Callable[[Batch], Tensor]
"""The loss of a peer, for `Batch.new` with a gradient."""


class Result(NamedTuple):
    value: Tensor
    gradient: Tensor
    """[T] by the log-probability of each token that trains."""


def differentiated(loss: Peer, batch: Batch) -> Result:
    """Return the value of a peer's loss and its gradient; tokens that do not train have none."""
    new = batch.new.clone().requires_grad_()
    value = loss(replace(batch, new=new))
    (gradient,) = torch.autograd.grad(value, new)
    assert not gradient[~batch.mask].any()
    return Result(value.detach(), gradient[batch.mask])


def ours(loss: Loss, batch: Batch, prepare: Callable[[Scored], Scored] = lambda given: given) -> Result:
    """Return the value of a loss and its gradient."""
    new = batch.new[batch.mask].clone().requires_grad_()
    value = loss(prepare(batch.packed(new))).loss
    (gradient,) = torch.autograd.grad(value, new)
    return Result(value.detach(), gradient)


def chosen(loss: Loss) -> Callable[[Scored], Scored]:
    """Return a function that chooses among the tokens, as a trainer does, for a loss with a `TokenChoice`."""

    def prepare(given: Scored) -> Scored:
        with torch.no_grad():
            measured = {each: each.measured(given).numpy() for each in getattr(loss, "choices", ())}
        return replace(given, chosen={each: torch.tensor(each.choose(of)) for each, of in measured.items()})

    return prepare


def agree(
    loss: Loss,
    peer: Peer,
    batch: Batch,
    *,
    value: bool = True,
    tolerance: float = 1e-6,
    prepare: Callable[[Scored], Scored] = lambda given: given,
) -> None:
    """Check that value and gradient of a loss are those of a peer; without `value`, the gradient alone."""
    found, expected = ours(loss, batch, prepare), differentiated(peer, batch)
    scale = float(expected.gradient.abs().max().clamp(min=1e-3))
    torch.testing.assert_close(
        found.gradient, expected.gradient, rtol=tolerance, atol=tolerance * scale * 1e-3, check_dtype=False
    )
    if value:
        torch.testing.assert_close(found.value, expected.value, rtol=tolerance, atol=1e-9, check_dtype=False)
