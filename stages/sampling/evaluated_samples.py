"""Candidates: the completions of one worker's share that may be among the best and the worst of an evaluation.

A worker keeps no more of them than it sends, and decodes only those. Knows neither how many are shown nor where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import anyio.to_thread
from msgspec.structs import replace

from ..._pipeline.accounting.sample import Kind, Sample, SampleBranch, best_and_worst
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.util.user_code import call_user
from ..._schemas import TrainBatch, TrajectoryGroup
from ..._schemas.bounds import cut
from ..contracts.policies import Tokenizer
from .samples import Place, last_with_tokens, place_of, sample_of

log = get_logger("penstock.evaluation")

MOST = 32
"""Of the best, and of the worst, that a worker sends; `Samples.count` of those of all workers are shown."""

KEPT = 8 * MOST
"""Number of completions that a worker reduces to those that it would send."""

LONGEST = 2**23
"""Characters of all texts that a worker sends at once: a message holds them in any script, and two thirds more in the
other sequences of their rollouts."""


class Candidate(NamedTuple):
    """One completion."""

    place: Place
    set: str
    group: TrajectoryGroup
    row: int
    """Its place in the group."""


@dataclass(eq=False, slots=True)
class Candidates:
    """The candidates of a worker's share of the evaluation of `step`.

    Args:
        step: that is evaluated.
        tokenizer: decodes them; without one there are no candidates.
    """

    step: int
    tokenizer: Tokenizer | None
    _kept: list[Candidate] = field(default_factory=list)

    def add(self, name: str, group: TrajectoryGroup) -> None:
        """Add the completions of a prompt of the set `name`, apart from those without a sampled token."""
        if self.tokenizer is None:
            return
        self._kept += [
            Candidate(
                place_of(float(group.rewards[row]), int(group.rollout_ids[row]), group.instance_id, name),
                name,
                group,
                row,
            )
            for row in last_with_tokens(group.completion_lengths(), group.rollout_starts())
        ]
        if len(self._kept) >= KEPT:
            self._kept = [candidate for _, _, candidate in self._chosen()]

    def _chosen(self) -> Iterator[tuple[Kind, int, Candidate]]:
        return best_and_worst(self._kept, MOST, lambda candidate: candidate.place)

    async def samples(self) -> tuple[Sample, ...]:
        """Return them as text; none, and a log entry, if the tokenizer cannot decode one."""
        if self.tokenizer is None:
            return ()
        try:
            return await anyio.to_thread.run_sync(call_user, partial(self._decoded, self.tokenizer))
        except Exception:  # an evaluation ends no run
            log.exception("samples_failed", step=self.step)
            return ()

    def _decoded(self, tokenizer: Tokenizer) -> tuple[Sample, ...]:
        return _within_bounds(
            [
                sample_of(
                    tokenizer,
                    TrainBatch.pack([candidate.group]),
                    candidate.row,
                    step=self.step,
                    evaluated=self.step,
                    set=candidate.set,
                    kind=kind,
                    rank=rank,
                )
                for kind, rank, candidate in self._chosen()
            ]
        )


def _within_bounds(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return samples whose texts fit into one message."""
    longest = LONGEST // max(1, 3 * len(samples))
    return tuple(
        replace(
            sample,
            prompt=cut(sample.prompt, longest),
            completion=cut(sample.completion, longest),
            answer=None if sample.answer is None else cut(sample.answer, longest),
            branches=[_cut_branch(branch, longest // len(sample.branches)) for branch in sample.branches],
        )
        for sample in samples
    )


def _cut_branch(branch: SampleBranch, longest: int) -> SampleBranch:
    return replace(branch, prompt=cut(branch.prompt, longest), completion=cut(branch.completion, longest))
