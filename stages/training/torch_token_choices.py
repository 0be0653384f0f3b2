"""Token choices: measure the tokens of all micro-batches and ranks, choose among them, and store the chosen ones.

Knows neither model nor loss. The order in which a rule sees tokens follows from the ids of their groups, their places
in these, and the number of the update: a run that is resumed, or has other micro-batches or ranks, chooses the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._schemas import TrainBatch
from ..losses.choices import TokenChoice
from ..losses.scored import Scored
from ..models.micro_batches import MicroBatch
from .torch_ranks import Ranks

KEYS = "token_keys"
"""Column [T] int64 of numbers that identify the tokens of a batch, and look random."""

Keys: TypeAlias = NDArray[np.uint64]

N = TypeVar("N", np.uint64, np.float64)


def token_keys(batch: TrainBatch) -> NDArray[np.int64]:
    """Return [N] the column `KEYS` of a batch, or of a rank's share of it: shares are whole groups."""
    of_groups = np.array([_digest(f"{group.env}\0{group.instance_id}") for group in batch.groups], np.uint64)
    sizes = np.array([group.sequences for group in batch.groups], np.int64)
    places = np.arange(len(batch)) - (sizes.cumsum() - sizes).repeat(sizes)
    of_sequences = _mixed(of_groups.repeat(sizes) + places.astype(np.uint64))
    lengths = batch.lengths()
    within = np.arange(lengths.sum()) - (lengths.cumsum() - lengths).repeat(lengths)
    return _mixed(of_sequences.repeat(lengths) + within.astype(np.uint64)).view(np.int64)


def choose_tokens(
    choices: Sequence[TokenChoice],
    parts: Sequence[MicroBatch | None],
    measure: Callable[[MicroBatch | None], list[Tensor]],
    ranks: Ranks | None,
    turn: int,
) -> None:
    """Store the tokens that each of `choices` chooses in the columns of `parts`; all ranks call this together.

    Args:
        choices: the rules.
        parts: the micro-batches, None where only other ranks have one.
        measure: returns the measurements of each rule, [T, M], of a micro-batch; it is called for None too.
        ranks: the ranks that train together.
        turn: number of the update: each has an order of its own.
    """
    found = [measure(part) for part in parts]
    own = [part for part in parts if part is not None]
    keys, first = _of_all(_joined([part.columns[KEYS] for part in own], np.uint64), ranks)
    order = np.argsort(_mixed(keys + _mixed(np.array([turn], np.uint64))), kind="stable")
    for number, (name, choice) in enumerate(zip(names_of(choices), choices, strict=True)):
        columns = [of_part[number] for of_part, part in zip(found, parts, strict=True) if part is not None]
        measured, _ = _of_all(_joined(columns, np.float64), ranks)
        chosen = np.zeros(len(order), np.bool_)
        chosen[order] = choice.choose(measured.reshape(len(order), choice.measurements)[order])
        start = first
        for part in own:
            rows = slice(start, start := start + len(part.targets))
            part.columns[name] = torch.from_numpy(chosen[rows].copy()).to(part.targets.device)


def names_of(choices: Sequence[TokenChoice]) -> list[str]:
    """Return the columns of the tokens that `choices` choose."""
    return [f"chosen/{number}" for number in range(len(choices))]


def chosen_of(choices: Sequence[TokenChoice], columns: Mapping[str, Tensor]) -> dict[object, Tensor]:
    """Return the chosen tokens among the columns of a micro-batch, by choice."""
    named = zip(choices, names_of(choices), strict=True)
    return {choice: columns[name] for choice, name in named if name in columns}


@torch.no_grad()
def measurements_of(choices: Sequence[TokenChoice], scored: Scored) -> list[Tensor]:
    """Return the measurements of each of `choices`, [T, M]."""
    return [choice.measured(scored) for choice in choices]


def _joined(columns: Sequence[Tensor], dtype: type[N]) -> NDArray[N]:
    arrays: list[NDArray[N]] = [column.cpu().numpy().astype(dtype).ravel() for column in columns]
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _of_all(values: NDArray[N], ranks: Ranks | None) -> tuple[NDArray[N], int]:
    """Return the values of all ranks, one rank after another, and the number of those before the values of this one."""
    if ranks is None:
        return values, 0
    gathered = [np.frombuffer(each, values.dtype) for each in ranks.gathered(values.tobytes())]
    return np.concatenate(gathered), sum(len(each) for each in gathered[: ranks.index])


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(numbers: Keys) -> Keys:
    """Return numbers that look random: SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
