"""The task: sums and differences of three one-digit numbers, made and scored by reasoning-gym's chain_sum.

There are 4,000 different problems. Eight hundred of them are held out, by their text: a problem that is drawn for
training or for the warm-up is drawn again if its text is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import count, islice
from typing import Any

from reasoning_gym.arithmetic import ChainSumConfig, ChainSumDataset

__all__ = ["HELD_OUT", "LONGEST_ANSWER", "TrainingProblems", "held_out", "is_right"]

LONGEST_ANSWER = 4
"""Tokens: a sign, two digits and the full stop."""

HELD_OUT = 800
"""Number of problems that are held out: two exams of 400, each large enough to distinguish 90 % from 93 %."""

LENGTH = 1_000_000
"""Number of problems in a training set; they repeat, because there are only 4,000."""

DRAWS = 100
"""Bound on draws of a problem: four of five are not held out."""

HELD_OUT_SEED = 0
"""chain_sum makes its problem i from the seed plus i, so seeds differ by more than the length of a set."""


def _chain_sum(seed: int, size: int) -> ChainSumDataset:
    return ChainSumDataset(ChainSumConfig(min_terms=3, max_terms=3, min_digits=1, max_digits=1, seed=seed, size=size))


def _without_words(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the problem with only its expression as question: `3+4-5=`."""
    return {**entry, "question": entry["metadata"]["expression"].replace(" ", "") + "="}


@cache
def held_out() -> tuple[dict[str, Any], ...]:
    """Return the problems that are never trained on, each once: the same in every run, with any seed."""
    problems = _chain_sum(HELD_OUT_SEED, LENGTH)
    different: dict[str, dict[str, Any]] = {}
    for number in count():
        entry = _without_words(problems[number])
        different.setdefault(entry["question"], entry)
        if len(different) == HELD_OUT:
            return tuple(different.values())
    raise AssertionError


@cache
def _held_out_questions() -> frozenset[str]:
    return frozenset(entry["question"] for entry in held_out())


class TrainingProblems:
    """A scored data set of problems that are not held out, in an order that depends on `seed` (0 or more).

    >>> TrainingProblems(seed=0)[7] == TrainingProblems(seed=0)[7]
    True
    """

    def __init__(self, seed: int) -> None:
        self._problems = _chain_sum((1 + seed) * DRAWS * LENGTH, DRAWS * LENGTH)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return problem `number`: question, answer and metadata, as in reasoning-gym."""
        draws = (_without_words(self._problems[number + draw * LENGTH]) for draw in range(DRAWS))
        fresh = (entry for entry in draws if entry["question"] not in _held_out_questions())
        return next(islice(fresh, 1))

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Return reasoning-gym's own score: 1 for the right number, less if the completion only contains it."""
        return float(self._problems.score_answer(answer, entry))


def is_right(answer: str, entry: dict[str, Any]) -> bool:
    """Return whether reasoning-gym gives `answer` the full score."""
    return bool(_scorer().score_answer(answer, entry) == 1)


@cache
def _scorer() -> ChainSumDataset:
    return _chain_sum(HELD_OUT_SEED, 1)
