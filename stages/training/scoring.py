"""How likely a model finds tokens: those of a micro-batch that train, or those of many sequences that are asked for.

Axes: S sequences, N tokens, T of them that train or are asked for, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._schemas import Array, InvalidRecord
from .causal_model import CausalModel, packed_attend
from .micro_batches import MicroBatch, micro_batches

__all__ = [
    "TEMPERATURE",
    "Likelihood",
    "Packed",
    "ScoredTokens",
    "check_temperature",
    "likelihood",
    "own_temperatures",
    "scored_tokens",
]


TEMPERATURE = "temperature"
"""A column of a micro-batch: at which each of its tokens is scored."""

OWN = "temperatures"
"""Key of `meta` under which a group says at which temperature each of its sequences is to be scored."""


class Sampled(Protocol):
    """A group, packed or not."""

    @property
    def env(self) -> str:
        """See `TrajectoryGroup`."""
        ...

    @property
    def instance_id(self) -> str:
        """See `TrajectoryGroup`."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """See `TrajectoryGroup`; a SourceEnv notes the temperature."""
        ...


class Likelihood(NamedTuple):
    """What a model says of tokens."""

    predicted: Tensor
    """[T, V] log-probability of the whole vocabulary where each token stands."""
    logprobs: Tensor
    """[T] that of the token itself."""


def likelihood(
    model: Callable[..., Tensor], part: MicroBatch, *, temperature: float = 1.0, autocast: torch.dtype | None = None
) -> Likelihood:
    """What `model`, a `CausalModel`, says of the tokens of `part` that train.

    Logits are made float32 before anything is summed over the vocabulary, whatever the model computed in.

    Args:
        model: is called once.
        part: its rows.
        temperature: logits are divided by it, unless `part` has a column with one for each token.
        autocast: in which the model computes where that is safe; None leaves it to the model.
    """
    with torch.autocast(part.tokens.device.type, autocast, enabled=autocast is not None):
        logits = model(part.tokens, positions=part.positions, attend=packed_attend(part.sequences))
    wanted = logits.flatten(0, 1).index_select(0, part.predicted_at)
    wanted = wanted.to(torch.promote_types(wanted.dtype, torch.float32))
    own = part.columns.get(TEMPERATURE)
    if own is not None:
        wanted = wanted / own[:, None]
    elif temperature != 1:  # which would copy them for nothing
        wanted = wanted / temperature
    predicted = torch.log_softmax(wanted, dim=-1)
    return Likelihood(predicted, predicted.gather(-1, part.targets[:, None]).squeeze(-1))


class Packed(NamedTuple):
    """Sequences one behind the other; see `Sequences`."""

    tokens: NDArray[np.int32]
    cu_seqlens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]

    @classmethod
    def of(
        cls, tokens: Sequence[NDArray[np.int32]], wanted: Sequence[NDArray[np.bool_]], lengths: NDArray[np.int64]
    ) -> Self:
        """Sequences of `lengths` [S], whose tokens come in pieces, and which of them are asked for."""
        return cls(np.concatenate(tokens), np.append(0, lengths.cumsum()), np.concatenate(wanted))


class ScoredTokens(NamedTuple):
    """What a model says of some of the tokens that were asked for."""

    places: NDArray[np.int64]
    """[T] where among all N they stand."""
    targets: Tensor
    """[T] which tokens they are."""
    likelihood: Likelihood


def scored_tokens(
    model: CausalModel,
    packed: Packed,
    micro_batch_tokens: int,
    *,
    temperature: float = 1.0,
    own: NDArray[np.float32] | None = None,
) -> Iterator[ScoredTokens]:
    """What `model` says of the tokens of `packed` that are asked for, a micro-batch at a time.

    `own` [S] are `own_temperatures`, where there are any.
    """
    device = next(model.parameters()).device
    known: dict[str, Array] = {"place": np.arange(len(packed.tokens))}
    if own is not None:
        known[TEMPERATURE] = own.repeat(np.diff(packed.cu_seqlens))
    for part in micro_batches(packed, known, micro_batch_tokens, device):
        found = likelihood(model, part, temperature=temperature)
        yield ScoredTokens(part.columns["place"].cpu().numpy(), part.targets, found)


def own_temperatures(
    groups: Sequence[Sampled], repetitions: Iterable[NDArray[np.int64]], otherwise: float
) -> NDArray[np.float32] | None:
    """[S] at which each sequence is to be scored, where any group says so; None where none does.

    Args:
        groups: one behind the other. `meta["temperatures"]` of a group has one for each repetition id.
        repetitions: ids of the sequences of each group.
        otherwise: for sequences of groups that say nothing.

    Raises:
        InvalidRecord: what a group says is not a positive number for each.
    """
    if not any(OWN in group.meta for group in groups):
        return None
    found = [
        _own(group, repetition) if OWN in group.meta else otherwise
        for group, ids in zip(groups, repetitions, strict=True)
        for repetition in ids.tolist()
    ]
    return np.array(found, np.float32)


def _own(group: Sampled, repetition: int) -> float:
    said = group.meta[OWN]
    found = said[repetition] if isinstance(said, list) and repetition < len(said) else None
    if not isinstance(found, int | float) or not 0 < found < math.inf:
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: {OWN}: expected a positive number for repetition {repetition}, "
            f"got {found!r}"
        )
    return float(found)


def check_temperature(groups: Iterable[Sampled], temperature: float, scorer: str) -> None:
    """Hold groups that say at which temperature they were sampled to that at which `scorer` scores them.

    Raises:
        InvalidRecord: a group says another one; every ratio to its log-probabilities would be off.
    """
    for group in groups:
        sampled_at = group.meta.get("temperature", temperature)
        if sampled_at != temperature:
            raise InvalidRecord(
                f"{group.env}/{group.instance_id}: temperature: expected {temperature}, which this {scorer} was given, "
                f"got {sampled_at}, at which the group was sampled: give both the same"
            )
