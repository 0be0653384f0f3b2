"""Samples: the best and the worst trajectories of a step or an evaluation, as text. Knows no view and no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ..._pipeline.accounting.sample import MOST_BRANCHES, Kind, Sample, best_and_worst
from ..._schemas import TrainBatch
from ..._schemas.batch import oldest_versions
from ..._schemas.numbers import normalize_counts
from ..contracts.policies import Tokenizer
from ..rewards.ground_truth import ground_truth
from .sample_tokens import sequence_of, tokens_of_row

Place: TypeAlias = tuple[float, int, int, str, str]


@dataclass(frozen=True, slots=True)
class Samples:
    """Choose the best and the worst trajectories of the first step, every k-th and each evaluation, by reward.

    Args:
        every: optimizer steps between two choices.
        count: of the best, and of the worst; fewer if there are not as many, and of an evaluation 32 at most.

    Raises:
        InvalidConfig: a number that is not whole, or below 1.
    """

    every: int = 10
    count: int = 5

    def __post_init__(self) -> None:
        normalize_counts(self, "every", "count")

    def due(self, step: int) -> bool:
        """Return whether samples of `step` are chosen."""
        return step == 1 or step % self.every == 0

    def of(
        self, batch: TrainBatch, step: int, tokenizer: Tokenizer, logprobs: NDArray[np.float32] | None = None
    ) -> list[Sample]:
        """Return samples of a batch, the best first, as the text of `tokenizer`. Call it in a worker thread.

        Args:
            batch: that was trained.
            step: the optimizer step that trained it.
            tokenizer: decodes the tokens.
            logprobs: [N] log-probability of each token that trains when training on the batch began; None if unknown.

        Raises:
            Exception: raised by the tokenizer.
        """
        return [
            sample_of(tokenizer, batch, row, logprobs, step=step, kind=kind, rank=rank)
            for kind, rank, row in self._chosen(batch)
        ]

    def of_evaluation(self, found: Sequence[Sample], step: int) -> list[Sample]:
        """Return the best and the worst of those that workers found in an evaluation, to be emitted with `step`."""
        chosen = best_and_worst(found, self.count, _place)
        return [replace(sample, step=step, kind=kind, rank=rank) for kind, rank, sample in chosen]

    def _chosen(self, batch: TrainBatch) -> Iterator[tuple[Kind, int, int]]:
        """Yield the kind, the rank and the row of each sample; of equal rewards, those of many groups first.

        Rows without a token that trains are left out.
        """
        owners = batch.group_of_sequence()
        within_group = np.arange(len(batch)) - np.searchsorted(owners, owners)
        places = list(zip(batch.rewards.tolist(), within_group.tolist(), range(len(batch)), strict=True))
        rows = last_with_tokens(batch.completion_lengths(), batch.rollout_starts())
        return best_and_worst(rows, self.count, places.__getitem__)


def last_with_tokens(trained: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    """Return the last sequence with a token that trains of each rollout that has one.

    Args:
        trained: [S] the number of such tokens of each sequence.
        starts: [R] the first sequence of each rollout.
    """
    rows = np.flatnonzero(trained)
    rollouts = np.searchsorted(starts, rows, side="right")
    last: list[int] = rows[np.flatnonzero(np.diff(rollouts, append=len(starts) + 1))].tolist()
    return last


def _place(sample: Sample) -> Place:
    return place_of(sample.reward, sample.repetition, sample.instance_id, sample.set)


def place_of(reward: float, repetition: int, instance_id: str, name: str) -> Place:
    """Return the place of a completion in an evaluation: those of equal reward are of many prompts, the first ones.

    A source's worker that was restarted puts a part before the number of a prompt, with a dot between.

    >>> place_of(1.0, 0, "1.12", "gsm8k")
    (1.0, 0, 2, '12', 'gsm8k')
    """
    number = instance_id.rpartition(".")[2]
    return reward, repetition, len(number), number, name


def sample_of(
    tokenizer: Tokenizer, batch: TrainBatch, row: int, logprobs: NDArray[np.float32] | None = None, **place: Any
) -> Sample:
    """Return a row of a batch as text, with the other sequences of its rollout. Blocks.

    Args:
        tokenizer: decodes the tokens.
        batch: that has the row.
        row: the number of a sequence with tokens that train.
        logprobs: see `Samples.of`.
        place: the step, the kind and the rank.

    Raises:
        Exception: raised by the tokenizer.
    """
    id_ = batch.ids[row]
    shown = sequence_of(tokenizer, batch, row, logprobs)
    tokens = tokens_of_row(batch, row)
    trains = batch.loss_mask[tokens]
    return Sample(
        **place,
        env=id_.env,
        instance_id=id_.instance_id,
        repetition=id_.repetition_id,
        prompt=shown.prompt,
        completion=shown.completion,
        answer=_answer(batch.groups[batch.group_of_sequence()[row]].meta),
        completion_tokens=int(trains.sum()),
        reward=float(batch.rewards[row]),
        parts={name: float(part[row]) for name, part in batch.reward_parts.items()},
        advantage=None if batch.advantages is None else float(batch.advantages[tokens][trains].mean()),
        stop_reason=shown.stop_reason,
        policy_version=int(oldest_versions(batch.policy_versions, batch.cu_seqlens)[row]),
        tokens=shown.tokens,
        branches=[sequence_of(tokenizer, batch, other, logprobs) for other in _others(batch, row)],
    )


def _others(batch: TrainBatch, row: int) -> list[int]:
    """Return the other sequences with tokens that train of the rollout of a row, at most `MOST_BRANCHES`."""
    starts = batch.rollout_starts()
    rollout = int(np.searchsorted(starts, row, side="right")) - 1
    end = int(starts[rollout + 1]) if rollout + 1 < len(starts) else len(batch)
    rows = range(int(starts[rollout]), end)
    return [other for other in rows if other != row and batch.loss_mask[tokens_of_row(batch, other)].any()][
        :MOST_BRANCHES
    ]


def _answer(meta: Mapping[str, Any]) -> str | None:
    """Return the right answer of a group's row as text, if it has one."""
    answer = ground_truth(meta.get("row") or {}).get("ground_truth")
    return answer if answer is None or isinstance(answer, str) else msgspec.json.encode(answer).decode()
