"""Samples: a few of the trajectories that a step trained, or that an evaluation completed, as text, for people to read.

A worker sends those of its share of an evaluation, so every field has its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from ..._schemas.bounds import MOST_NAMES, Count, Line, Measure, Name, Passage, Signed

T = TypeVar("T")

Kind: TypeAlias = Literal["best", "worst"]


MOST_TOKENS = 2048
"""Tokens of a sequence that are described one by one: the first of those from the first sampled token on."""

MOST_BRANCHES = 16
"""Further sequences of a rollout that a sample has."""

Numbers: TypeAlias = Annotated[list[Measure], Meta(max_length=MOST_TOKENS)]


class SampleTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a completion, one by one: at most the first `MOST_TOKENS`. Values that repeat are written once."""

    characters: Annotated[list[Count], Meta(max_length=MOST_TOKENS)]
    """The number of characters that each token adds to the text."""
    trains: Annotated[list[tuple[Count, bool]], Meta(max_length=MOST_TOKENS)]
    """Successive tokens: their number, and whether they were sampled and train. Others are the environment's."""
    advantages: Annotated[list[tuple[Count, Measure]], Meta(max_length=MOST_TOKENS)] | None = None
    """Successive tokens that train: their number, and their advantage."""
    versions: Annotated[list[tuple[Count, Signed]], Meta(max_length=MOST_TOKENS)] = []
    """Successive tokens that train: their number, and the weights that sampled them."""
    logprobs: Numbers | None = None
    """The log-probability of each token that trains under the policy that sampled it, in nats."""
    log_ratios: Numbers | None = None
    """The logarithm of its probability when training on the batch began, over that at sampling."""


class SampleBranch(msgspec.Struct, frozen=True, kw_only=True):
    """Another sequence of the rollout of a sample: an agent may go back to an earlier turn, or drop some."""

    prompt: Passage
    completion: Passage
    tokens: SampleTokens | None = None
    stop_reason: Name = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory that an optimizer step trained, or that an evaluation completed; a line of `samples.jsonl`."""

    step: Count
    """The optimizer step; of an evaluation, the one whose metrics it is emitted with."""
    evaluated: Count | None = None
    """The step whose weights an evaluation evaluated; None for a trajectory that was trained."""
    set: Name = ""
    """The set that was evaluated."""
    kind: Kind
    """Its place in the step or the evaluation by reward: among the best, or among the worst."""
    rank: Count
    """1 for the best of the best, and for the worst of the worst."""
    env: Line
    instance_id: Line
    """The prompt within the environment."""
    repetition: Count
    """The number of the completion of its prompt."""
    prompt: Passage
    """The text before the first token that was sampled."""
    completion: Passage
    """The text from there on; answers of the environment between several turns are included."""
    answer: Passage | None = None
    """The right answer, where the row of the prompt has one."""
    completion_tokens: Count
    """The number of tokens that were sampled."""
    reward: Measure
    parts: Annotated[dict[Name, Measure], Meta(max_length=MOST_NAMES)]
    """The parts of the reward, by name."""
    advantage: Measure | None
    """The mean over the tokens that train; None where there are no advantages."""
    stop_reason: Name
    """The name of a StopReason, in small letters."""
    policy_version: Signed
    """The oldest weights that sampled it."""
    tokens: SampleTokens | None = None
    """The tokens of the completion; None if they cannot be told apart in the text, or in lines of earlier versions."""
    branches: Annotated[list[SampleBranch], Meta(max_length=MOST_BRANCHES)] = []
    """The other sequences of its rollout with tokens that train, the first ones of many."""

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain values, without the tokens one by one and the other sequences."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if name not in {"tokens", "branches"}}

    @property
    def of_step(self) -> int:
        """Return the step that people know it by: the one that trained it, or whose weights were evaluated."""
        return self.step if self.evaluated is None else self.evaluated


SampleSink: TypeAlias = Callable[[Sequence[Sample], int], None]
"""Takes the samples that are emitted with one optimizer step, and the step. It is called in a thread, and may block."""


def best_and_worst(rows: Sequence[T], count: int, key: Callable[[T], tuple[Any, ...]]) -> Iterator[tuple[Kind, int, T]]:
    """Yield the kind, the rank and the row of the best `count` and the worst `count`; of few rows, each once.

    Those of a part of the rows that are among the best or worst of all are among those of the part.

    Args:
        rows: to choose from.
        count: of the best, and of the worst.
        key: returns the reward of a row, and then the order of rows of equal reward, the first one first.

    >>> [(kind, row) for kind, _, row in best_and_worst([3.0, 1.0, 2.0], 1, lambda reward: (reward,))]
    [('best', 3.0), ('worst', 1.0)]
    """
    ranked = sorted(rows, key=lambda row: (-key(row)[0], *key(row)[1:]))
    best = min(count, (len(ranked) + 1) // 2)
    for rank, row in enumerate(ranked[:best], 1):
        yield "best", rank, row
    for rank, row in enumerate(sorted(ranked[best:], key=key)[:count], 1):
        yield "worst", rank, row
