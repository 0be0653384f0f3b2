"""What a teacher says of a sequence, as it comes: for every token some candidates, of any number and in any order.

Here they are checked and laid out in the columns of a group. Knows no teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord

__all__ = ["TeacherCandidates"]

ROUNDING = 1e-3
"""A log-probability may be that much above 0: engines compute in bfloat16, too."""


class TeacherCandidates(NamedTuple):
    """Tokens that a teacher finds likely, for each of the T tokens of a sequence; C in all.

    Those of token t are what the teacher expects there, given the tokens before it; the first has none.
    """

    counts: NDArray[np.int64]
    """[T] how many each token has."""
    ids: NDArray[np.int32]
    """[C] one token's after another's."""
    logprobs: NDArray[np.float32]
    """[C]."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float] | None]) -> Self:
        """From one mapping of ids to log-probabilities a token, or None where there are none.

        >>> TeacherCandidates.of([None, {7: -0.5, 3: -1.0}]).ids.tolist()
        [7, 3]
        """
        told = [row or {} for row in rows]
        return cls(
            np.array([len(row) for row in told], np.int64),
            np.array([index for row in told for index in row], np.int32),
            np.array([logprob for row in told for logprob in row.values()], np.float32),
        )

    def columns(self, tokens: NDArray[np.int32], width: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and log-probabilities, both [T, width]: the token itself first, then the likeliest others.

        Where a token has fewer than `width`, the rest is −1 and 0. A log-probability of −inf is no candidate.

        Raises:
            InvalidRecord: they are not what can be said of `tokens` [T].
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
            f"expected each candidate of a token once, got {ordered[token, rank]} more often for token {token}"
        )
