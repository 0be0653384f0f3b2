"""How likely a model finds the tokens of a micro-batch that train.

Axes: T tokens that train, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..schemas import InvalidRecord
from .causal_model import packed_attend
from .micro_batches import MicroBatch

__all__ = ["Likelihood", "check_temperature", "likelihood"]


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
        temperature: logits are divided by it.
        autocast: in which the model computes where that is safe; None leaves it to the model.
    """
    with torch.autocast(part.tokens.device.type, autocast, enabled=autocast is not None):
        logits = model(part.tokens, positions=part.positions, attend=packed_attend(part.sequences))
    wanted = logits.flatten(0, 1).index_select(0, part.predicted_at)
    wanted = wanted.to(torch.promote_types(wanted.dtype, torch.float32))
    if temperature != 1:  # which would copy them for nothing
        wanted = wanted / temperature
    predicted = torch.log_softmax(wanted, dim=-1)
    return Likelihood(predicted, predicted.gather(-1, part.targets[:, None]).squeeze(-1))


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
