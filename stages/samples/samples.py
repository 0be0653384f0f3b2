"""Samples: the best and the worst trajectories of a step, as text. Knows nothing about where they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.sample import Kind, Sample
from ..._schemas import StopReason, TrainBatch
from ..._schemas.batch import oldest_versions
from ..._schemas.numbers import normalize_counts
from ..engines.policies import Tokenizer


@dataclass(frozen=True, slots=True)
class Samples:
    """Choose the best and the worst trajectories of the first step and of every k-th, by reward.

    Args:
        tokenizer: of the run; decodes prompts and completions.
        every: optimizer steps between two choices.
        count: of the best, and of the worst; fewer where the batch is smaller than both together.

    Raises:
        InvalidConfig: a number that is not whole, or below 1.
    """

    tokenizer: Tokenizer
    every: int = 10
    count: int = 5

    def __post_init__(self) -> None:
        normalize_counts(self, "every", "count")

    def due(self, step: int) -> bool:
        """Return whether samples of `step` are chosen."""
        return step == 1 or step % self.every == 0

    def of(self, batch: TrainBatch, step: int) -> list[Sample]:
        """Return samples of a batch, the best first. Decodes text: call it in a worker thread.

        Raises:
            Exception: raised by the tokenizer.
        """
        return [self._sample(batch, step, *chosen) for chosen in self._chosen(batch)]

    def _chosen(self, batch: TrainBatch) -> Iterator[tuple[Kind, int, int]]:
        """Yield the kind, the rank and the row of each sample. Rows without a token that trains are left out."""
        rows = np.flatnonzero(batch.completion_lengths())
        best = _first(-batch.rewards, rows, batch)[: min(self.count, (len(rows) + 1) // 2)]
        worst = _first(batch.rewards, np.setdiff1d(rows, best), batch)[: self.count]
        for kind, found in zip(get_args(Kind), (best, worst), strict=True):
            yield from ((kind, rank, row) for rank, row in enumerate(found.tolist(), 1))

    def _sample(self, batch: TrainBatch, step: int, kind: Kind, rank: int, row: int) -> Sample:
        tokens = slice(*batch.cu_seqlens[row : row + 2].tolist())
        trains = batch.loss_mask[tokens]
        begin = int(np.argmax(trains))
        ids = batch.tokens[tokens].tolist()
        id_ = batch.ids[row]
        return Sample(
            step=step,
            kind=kind,
            rank=rank,
            env=id_.env,
            instance_id=id_.instance_id,
            repetition=id_.repetition_id,
            prompt=self.tokenizer.decode(ids[:begin]),
            completion=self.tokenizer.decode(ids[begin:]),
            completion_tokens=int(trains.sum()),
            reward=float(batch.rewards[row]),
            parts={name: float(part[row]) for name, part in batch.reward_parts.items()},
            advantage=None if batch.advantages is None else float(batch.advantages[tokens][trains].mean()),
            stop_reason=StopReason(int(batch.stop_reasons[row])).name.lower(),
            policy_version=int(oldest_versions(batch.policy_versions, batch.cu_seqlens)[row]),
        )


def _first(key: NDArray[np.float32], rows: NDArray[np.int64], batch: TrainBatch) -> NDArray[np.int64]:
    """Return `rows` by their `key` [B], the smallest first; equal ones so that they are of many groups."""
    owners = batch.group_of_sequence()
    within_group = np.arange(len(batch)) - np.searchsorted(owners, owners)
    return rows[np.lexsort((within_group[rows], key[rows]))]
