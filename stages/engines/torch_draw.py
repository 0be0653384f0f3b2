"""Draws of tokens from scores, by device: the inverse of the cumulative distribution on a CPU, noise on others.

The inverse takes one random number a row, and one pass of exponentials; noise takes one random number for each token of
the vocabulary: slow on a CPU, parallel on other devices. Both draw from the same distribution.

Axes: b rows, V vocabulary, C chunks of `CHUNK` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK = 128
"""Tokens whose probabilities are summed in float32; the sums, and those within the chosen chunk, are added in float64,
so that no token of a large vocabulary is lost to rounding."""

BLOCK = 64
"""Random numbers of a row that are made at once."""


class InverseDraw:
    """Draws by the inverse of the cumulative distribution; keeps the memory of the weights for the next draw."""

    def __init__(self) -> None:
        self._weights = torch.empty(0, 0)

    def __call__(self, scores: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token for each row, [b] int64, and the logarithm of the sum of exp(scores), [b] float64.

        A token is drawn in proportion to exp(score), never one whose exponential is 0.

        Args:
            scores: [b, V] float32; -inf for tokens that must not be drawn.
            uniform: [b] float64, at least 0 and below 1.
        """
        highest = scores.amax(dim=-1, keepdim=True)
        weights = self._weights_of(scores, highest)
        sums = weights.sum(dim=-1).double().cumsum(dim=-1)
        chunk, rest = _first_above(sums, uniform[:, None] * sums[:, -1:])
        inside = weights[torch.arange(len(scores)), chunk[:, 0]].double().cumsum(dim=-1)
        place, _ = _first_above(inside, rest)
        return (chunk * CHUNK + place)[:, 0], (highest + sums[:, -1:].log())[:, 0]

    def _weights_of(self, scores: Tensor, highest: Tensor) -> Tensor:
        """Return exp(scores - highest), [b, C, CHUNK], with zeros behind the last token."""
        rows, tokens = scores.shape
        chunks = -(-tokens // CHUNK)
        if len(self._weights) < rows or self._weights.shape[1] != chunks * CHUNK:
            self._weights = scores.new_zeros(rows, chunks * CHUNK)
        weights = self._weights[:rows]
        torch.sub(scores, highest, out=weights[:, :tokens]).exp_()
        weights[:, tokens:] = 0
        return weights.view(rows, chunks, CHUNK)


def _first_above(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return [b, 1] the first place with a cumulative sum above `target`, and the part of `target` within it.

    That place has a weight above 0, also where rounding makes `target` the whole sum.
    """
    target = torch.minimum(target, torch.nextafter(sums[:, -1:], torch.zeros_like(target)))
    place = (sums <= target).sum(dim=-1, keepdim=True)
    before = torch.where(place > 0, sums.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place, target - before


def draw_by_noise(scores: Tensor, exponential: Tensor) -> Tensor:
    """Return a token for each row, [b] int64, by the Gumbel trick; `exponential` [b, V] is overwritten."""
    return exponential.log_().neg_().add_(scores).argmax(dim=-1)


def uniforms(seed: int) -> Iterator[float]:
    """Yield the random numbers of one row, at least 0 and below 1, without end."""
    numbers = np.random.default_rng(seed)
    while True:
        yield from numbers.random(BLOCK).tolist()
