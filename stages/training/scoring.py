"""Log-probabilities of tokens under a model: of the tokens of a micro-batch that train, or of requested tokens.

Axes: S sequences, N tokens, T of them that train or are requested, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._schemas import Array, InvalidRecord, TrajectoryGroup
from ..._schemas.batch import PackedGroup
from .attention import Attention
from .causal_model import CausalModel
from .micro_batches import MicroBatch, Packed, micro_batches

TEMPERATURE = "temperature"
"""A column of a micro-batch: the temperature at which each token is scored."""

TEMPERATURES = "temperatures"
"""Key of `meta` with the temperature at which each sequence of a group is scored."""


Sampled: TypeAlias = TrajectoryGroup | PackedGroup


class Likelihood(NamedTuple):
    """Log-probabilities of tokens under a model."""

    predicted: Tensor
    """[T, V] log-probability of the whole vocabulary at each token."""
    logprobs: Tensor
    """[T] log-probability of the token itself."""


def likelihood(
    model: Callable[..., Tensor], part: MicroBatch, *, temperature: float = 1.0, autocast: torch.dtype | None = None
) -> Likelihood:
    """Return the log-probabilities under `model`, a `CausalModel`, of the tokens of `part` that train.

    Logits are converted to float32 before any sum over the vocabulary.

    Args:
        model: called once.
        part: the rows.
        temperature: logits are divided by it, unless `part` has a column with one for each token.
        autocast: dtype in which the model computes where that is safe; None for the dtype of the model.
    """
    with torch.autocast(part.tokens.device.type, autocast, enabled=autocast is not None):
        logits = model(part.tokens, positions=part.positions, attend=Attention.packed(part.sequences))
    wanted = logits.flatten(0, 1).index_select(0, part.predicted_at)
    wanted = wanted.to(torch.promote_types(wanted.dtype, torch.float32))
    own = part.columns.get(TEMPERATURE)
    if own is not None:
        wanted = wanted / own[:, None]
    elif temperature != 1:  # a division by 1 would only copy them
        wanted = wanted / temperature
    predicted = torch.log_softmax(wanted, dim=-1)
    return Likelihood(predicted, predicted.gather(-1, part.targets[:, None]).squeeze(-1))


class ScoredTokens(NamedTuple):
    """Log-probabilities of some of the requested tokens."""

    places: NDArray[np.int64]
    """[T] index of each among all N."""
    targets: Tensor
    """[T] the tokens."""
    likelihood: Likelihood


def scored_tokens(
    model: CausalModel,
    packed: Packed,
    micro_batch_tokens: int,
    *,
    temperature: float = 1.0,
    own: NDArray[np.float32] | None = None,
) -> Iterator[ScoredTokens]:
    """Yield the log-probabilities under `model` of the requested tokens of `packed`, a micro-batch at a time.

    `own` [S] are `own_temperatures`, if there are any.
    """
    device = next(model.parameters()).device
    known: dict[str, Array] = {"place": np.arange(len(packed.tokens))}
    if own is not None:
        known[TEMPERATURE] = own.repeat(np.diff(packed.cu_seqlens))
    for part in micro_batches(packed, known, micro_batch_tokens, device):
        found = likelihood(model, part, temperature=temperature)
        yield ScoredTokens(part.columns["place"].cpu().numpy(), part.targets, found)


def own_temperatures(
    groups: Sequence[Sampled], repetitions: Iterable[NDArray[np.int64]], default: float
) -> NDArray[np.float32] | None:
    """Return [S] the temperature at which each sequence is scored; None if no group has its own.

    Args:
        groups: one behind the other. `meta["temperatures"]` of a group has one for each repetition id.
        repetitions: ids of the sequences of each group.
        default: for sequences of groups without.

    Raises:
        InvalidRecord: a group lacks a positive number for a repetition.
    """
    if not any(TEMPERATURES in group.meta for group in groups):
        return None
    found = [
        _own(group, repetition) if TEMPERATURES in group.meta else default
        for group, ids in zip(groups, repetitions, strict=True)
        for repetition in ids.tolist()
    ]
    return np.array(found, np.float32)


def _own(group: Sampled, repetition: int) -> float:
    temperatures = group.meta[TEMPERATURES]
    listed = isinstance(temperatures, list) and repetition < len(temperatures)
    found = temperatures[repetition] if listed else None
    if not isinstance(found, int | float) or not 0 < found < math.inf:
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: {TEMPERATURES}: expected a positive number for repetition {repetition}, "
            f"got {found!r}"
        )
    return float(found)


def check_temperature(groups: Iterable[Sampled], temperature: float, scorer: str) -> None:
    """Check that groups were sampled at the temperature at which `scorer` scores them, where they contain it.

    Raises:
        InvalidRecord: a group was sampled at another; every ratio to its log-probabilities would be wrong.
    """
    for group in groups:
        sampled_at = group.meta.get("temperature", temperature)
        if sampled_at != temperature:
            raise InvalidRecord(
                f"{group.env}/{group.instance_id}: temperature: expected {temperature}, which this {scorer} was given, "
                f"got {sampled_at}, at which the group was sampled: set both to the same"
            )
