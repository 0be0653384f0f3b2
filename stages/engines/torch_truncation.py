"""Restrictions of the tokens that rows of a batch may draw: repetition penalty, top_k, top_p and min_p.

In the order of transformers' generation, with the parameters of each row. Only the draw is restricted: the
log-probabilities of `torch_sampling` are of the whole distribution, or of `supports` where they are kept. Knows no
model.

Axes: b rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..contracts.sampling_params import SamplingParams
from ..contracts.support import restricted


@dataclass(slots=True)
class Restrictions:
    """The restrictions of each row; None if no row has any."""

    top_k: Tensor | None
    """[b, 1] int64, V or more for all tokens."""
    top_p: Tensor | None
    """[b, 1]."""
    min_p: Tensor | None
    """[b, 1]."""
    penalty: Tensor | None
    """[b, 1]."""
    widths: Tensor | None
    """[b, 1] int64 tokens of a support that is kept at most, 0 where it is not; None if no row keeps its own."""
    seen: Tensor | None = None
    """[b, V] bool: tokens of the prompt and of the completion so far; None without a penalty."""

    @classmethod
    def of(cls, samplings: Sequence[SamplingParams], device: torch.device) -> Restrictions | None:
        """Return the restrictions of rows with these parameters; None without any."""
        every = torch.iinfo(torch.int64).max
        top_k = _column([every if s.greedy or s.top_k is None else s.top_k for s in samplings], every, device)
        top_p = _column([1.0 if s.greedy else s.top_p for s in samplings], 1.0, device)
        min_p = _column([0.0 if s.greedy else s.min_p for s in samplings], 0.0, device)
        penalty = _column([s.repetition_penalty for s in samplings], 1.0, device)
        widths = _column([s.support for s in samplings], 0, device)
        restricted = any(column is not None for column in (top_k, top_p, min_p, penalty))
        return cls(top_k, top_p, min_p, penalty, widths) if restricted else None

    def scores(self, logits: Tensor, inverse_temperature: Tensor, contents: Iterable[NDArray[np.int32]]) -> Tensor:
        """Return [b, V] the tempered logits, -inf where a token must not be drawn.

        Args:
            logits: [b, V] float32 of the model.
            inverse_temperature: [b, 1].
            contents: the prompt and the completion so far of each row; read by the first call only.
        """
        scores = self._penalised(logits, contents) * inverse_temperature
        if self.top_k is not None:
            scores = _cut_to_top_k(scores, self.top_k)
        if self.top_p is not None:
            scores = _cut_to_top_p(scores, self.top_p)
        if self.min_p is not None:
            probabilities = scores.softmax(dim=-1)
            least = self.min_p * probabilities.amax(dim=-1, keepdim=True)
            scores = scores.masked_fill(probabilities < least, -torch.inf)
        return scores

    def supports(self, scores: Tensor) -> Tensor | None:
        """Return [b, W] int64 the tokens that rows are drawn from, −1 for none; None if no row keeps its own.

        Of tokens with equal scores at the end of `top_k`, a row that keeps its support draws from some alone.

        Args:
            scores: [b, V] of the draw; −inf is set where a row that keeps its support must not draw.
        """
        if self.widths is None:
            return None
        highest, ids = scores.topk(min(int(self.widths.max()), scores.shape[1]))
        kept = (torch.arange(ids.shape[1], device=ids.device) < self.widths) & ~highest.isneginf()
        support = ids.masked_fill(~kept, -1)
        restricted(scores, support)
        return support

    def _penalised(self, logits: Tensor, contents: Iterable[NDArray[np.int32]]) -> Tensor:
        if self.penalty is None:
            return logits
        if self.seen is None:
            self.seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
            for row, content in enumerate(contents):
                self.seen[row, torch.from_numpy(content).to(logits.device, torch.int64)] = True
        changed = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(self.seen, changed, logits)

    def add(self, chosen: Tensor) -> None:
        """Add the tokens [b] drawn last to those that are penalised."""
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)


def _column(values: Sequence[float], neutral: float, device: torch.device) -> Tensor | None:
    """Return [b, 1] of `values`; None if all are `neutral`."""
    return None if all(value == neutral for value in values) else torch.tensor(values, device=device)[:, None]


def _cut_to_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Cut all scores below the k-th highest of a row; ties with it stay."""
    counts = top_k.clamp(max=scores.shape[1])
    highest = scores.topk(int(counts.max())).values
    return scores.masked_fill(scores < highest.gather(1, counts - 1), -torch.inf)


def _cut_to_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Cut the least probable tokens, as long as the others keep a probability of `top_p`; the best one stays."""
    ordered, order = scores.sort(dim=-1)
    cut = (ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p) & (top_p < 1)
    cut[:, -1] = False
    return scores.masked_fill(torch.zeros_like(cut).scatter_(1, order, cut), -torch.inf)
