"""The support of a truncated draw: the tokens that each token was drawn from, and logits restricted to them.

`top_k`, `top_p` and `min_p` draw from the most probable tokens alone. With their ids sampler and trainer compute their
log-probabilities over the same tokens, so that a ratio compares two policies by the distribution that was sampled. The
method is that of slime's replay of top_p, and SkyRL's sample support.

Axes: T tokens, C of them in a chunk, W tokens of a support at most, B tokens of a part of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPPORT = "support_ids"
"""Column [T, W] of the ids; −1 where a support has fewer than W, and alone for the whole vocabulary."""


def restricted(logits: Tensor, support: Tensor | None, first: int = 0) -> Tensor:
    """Return `logits` [C, B] of the tokens from `first` on, −inf where a token is in no support; overwrites them.

    Args:
        logits: [C, B].
        support: [C, W] ids, see `SUPPORT`; None for the whole vocabulary.
        first: the first token of the part of the vocabulary.
    """
    return logits if support is None else logits.masked_fill_(_excluded(logits, support, first), -torch.inf)


def _excluded(logits: Tensor, support: Tensor, first: int) -> Tensor:
    """Return [C, B], whether a token is excluded from the draw."""
    rows, width = logits.shape
    place = support.long() - first
    inside = (place >= 0) & (place < width) & (support >= 0)
    excluded = torch.ones(rows, width + 1, dtype=torch.bool, device=logits.device)
    excluded.scatter_(1, torch.where(inside, place, width), value=0)  # ids of other parts go behind the last
    return excluded[:, :width] & (support >= 0).any(1, keepdim=True)
