"""The temperature of sampled groups, which a trainer that is not penstock's applies to its own logits."""

from __future__ import annotations

from ...._schemas import InvalidRecord, TrajectoryGroup
from ...engines.sampling_params import TEMPERATURES


def check_temperature(group: TrajectoryGroup, temperature: float | None, trainer: str) -> None:
    """Check that the group was sampled at the trainer's temperature, where both are known.

    Raises:
        InvalidRecord: it was not.
    """
    sampled = group.meta.get("temperature")
    if TEMPERATURES in group.meta or (None not in (sampled, temperature) and sampled != temperature):
        found = "temperatures that differ between turns" if TEMPERATURES in group.meta else sampled
        raise InvalidRecord(
            f"{group.env}/{group.instance_id}: expected log-probabilities at the temperature of {trainer}'s "
            f"configuration, {temperature}, got {found}: sample with SamplingParams(temperature={temperature})"
        )
