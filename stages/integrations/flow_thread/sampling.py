"""Sampled groups that a foreign trainer can train: at the temperature of its logits, one sequence for each rollout."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...._schemas import InvalidRecord, TrajectoryGroup
from ...._schemas.conversion import convert
from ...contracts.sampling_params import TEMPERATURES

Temperatures: TypeAlias = list[float | list[tuple[int, float]] | None]
"""For each repetition one, or one for each part of its sequence: `(tokens, temperature)`."""


def check_sampling(group: TrajectoryGroup, temperature: float | None, trainer: str) -> None:
    """Check that the group has no branches, and the trainer's temperature where both are known.

    Raises:
        InvalidRecord: it has others.
    """
    check_unbranched(group, trainer)
    if (found := other_temperature(group, temperature)) is not None:
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: expected log-probabilities at the temperature of {trainer}'s "
            f"configuration, {temperature}, got {found}: sample with SamplingParams(temperature={temperature})"
        )


def check_unbranched(group: TrajectoryGroup, trainer: str) -> None:
    """Check that each rollout of the group has one sequence.

    Raises:
        InvalidRecord: one has several.
    """
    if (branched := branches(group)) is not None:
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: expected one sequence for each rollout, because {trainer} compares and "
            f"weighs sequences, got {branched}: train it with TorchTrainer, or have the agent continue its history"
        )


def branches(group: TrajectoryGroup) -> str | None:
    """Return the numbers of sequences and rollouts, if they differ; else None."""
    return None if group.rollouts == len(group) else f"{len(group)} sequences of {group.rollouts} rollouts"


def other_temperature(group: TrajectoryGroup, temperature: float | None) -> str | None:
    """Return the temperature of the group's log-probabilities, if it is known and not `temperature`; else None."""
    if TEMPERATURES not in group.meta:
        sampled = group.meta.get("temperature")
        return None if None in (sampled, temperature) or sampled == temperature else str(sampled)
    try:
        rows = convert(group.meta[TEMPERATURES], Temperatures)
    except msgspec.ValidationError:
        return f"values in an unknown form, {group.meta[TEMPERATURES]!r}"
    found = {part for row in rows if row is not None for part in _parts(row)}
    return None if found <= {temperature} else ", ".join(map(str, sorted(found)))


def _parts(row: float | list[tuple[int, float]]) -> list[float]:
    return [temperature for _, temperature in row] if isinstance(row, list) else [row]
