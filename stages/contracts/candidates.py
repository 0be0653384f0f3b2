"""TeacherCandidates: the candidates of a teacher for every token of a sequence, of any number and in any order.

This module checks them and lays them out in the columns of a group. Knows no teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord

ROUNDING = 1e-3
"""Tolerance above 0 for a log-probability, because engines may compute in bfloat16."""


class TeacherCandidates(NamedTuple):
    """Tokens that a teacher finds likely, for each of the T tokens of a sequence; C in all.

    Those of token t are predictions given the tokens before it; the first token has none.
    """

    counts: NDArray[np.int64]
    """[T] number of candidates of each token."""
    ids: NDArray[np.int32]
    """[C] candidates, token after token."""
    logprobs: NDArray[np.float32]
    """[C]."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float] | None]) -> Self:
        """Make candidates of a mapping from ids to log-probabilities for each token; None for a token without any.

        >>> TeacherCandidates.of([None, {7: -0.5, 3: -1.0}]).ids.tolist()
        [7, 3]
        """
        known = [row or {} for row in rows]
        return cls(
            np.array([len(row) for row in known], np.int64),
            np.array([index for row in known for index in row], np.int32),
            np.array([logprob for row in known for logprob in row.values()], np.float32),
        )

    def columns(self, tokens: NDArray[np.int32], width: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and log-probabilities, both [T, width]: the token itself first, then the likeliest others.

        Where a token has fewer than `width`, the rest is −1 and 0. A log-probability of −inf is no candidate.

        Raises:
            InvalidRecord: they are not valid candidates for `tokens` [T].
        """
        self._check(len(tokens))
        filled = np.arange(max(width, int(self.counts.max(initial=0)))) < self.counts[:, None]
        ids, logprobs = np.full(filled.shape, -1, np.int32), np.full(filled.shape, -np.inf, np.float32)
        ids[filled], logprobs[filled] = self.ids, self.logprobs
        _check_once(ids)
        rank = -logprobs
        rank[(ids == tokens[:, None]) & (logprobs > -np.inf)] = -np.inf
        order = rank.argsort(axis=1, kind="stable")[:, :width]
        ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
        impossible = np.isneginf(logprobs)
        ids[impossible], logprobs[impossible] = -1, 0
        return ids, np.minimum(logprobs, 0, out=logprobs)

    def _check(self, tokens: int) -> None:
        if len(self.counts) != tokens:
            raise InvalidRecord(f"expected candidates for {tokens} tokens, got them for {len(self.counts)}")
        if not len(self.ids) == len(self.logprobs) == self.counts.sum():
            raise InvalidRecord(
                f"expected {self.counts.sum()} candidates in all, got {len(self.ids)} ids and "
                f"{len(self.logprobs)} log-probabilities"
            )
        if len(self.ids) and self.ids.min() < 0:
            raise InvalidRecord(f"expected candidates of 0 or more, got {self.ids.min()}")
        wrong = ~(self.logprobs <= ROUNDING)  # NaN is neither below nor above
        if wrong.any():
            raise InvalidRecord(f"expected log-probabilities of 0 or less, got {self.logprobs[wrong.argmax()]}")


def _check_once(ids: NDArray[np.int32]) -> None:
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, rank = np.argwhere(twice)[0]
        raise InvalidRecord(
            f"expected each candidate of a token once, got {ordered[token, rank]} repeatedly for token {token}"
        )
