"""What TRL trained is known from the micro-batches that it collated, and what it drops from its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock import TrajectoryId
from penstock._stages.integrations.flow_thread.flow_run import Drop
from penstock._stages.integrations.trl.deliveries import SampleBounds, TRLDeliveries


@dataclass
class Sample:
    model_version: int = 1
    input_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))


def taken(deliveries: TRLDeliveries, count: int) -> list[Sample]:
    samples = [Sample() for _ in range(count)]
    for number, sample in enumerate(samples):
        deliveries.take(sample, TrajectoryId("env", "0", number))
    return samples


def test_a_step_has_trained_the_oldest_micro_batches_and_not_those_collated_ahead() -> None:
    deliveries = TRLDeliveries()
    samples = taken(deliveries, 6)
    for first in (0, 2, 4):
        deliveries.collate([sample.input_ids for sample in samples[first : first + 2]])

    deliveries.train()
    deliveries.train()

    assert [trajectory.repetition_id for trajectory in deliveries.step()] == [0, 1, 2, 3]
    assert deliveries.step() == []
    assert "1 micro-batches collated" in repr(deliveries)


def test_equal_samples_are_told_apart() -> None:
    deliveries = TRLDeliveries()
    first, second = taken(deliveries, 2)

    deliveries.collate([second.input_ids])
    deliveries.collate([first.input_ids])
    deliveries.train()

    assert [trajectory.repetition_id for trajectory in deliveries.step()] == [1]


def test_a_sample_is_dropped_when_it_lags_more_versions_than_trl_allows() -> None:
    limits = SampleBounds(max_staleness=2)

    assert limits.drop(Sample(model_version=1), 3) is None
    assert limits.drop(Sample(model_version=1), 4) == Drop("stale", "dropped by TRL: older than max_staleness=2")


def test_a_sample_is_dropped_when_it_is_longer_than_a_row() -> None:
    assert SampleBounds(4, token_budget=3).drop(Sample(), 1) is None
    assert SampleBounds(4, token_budget=0).drop(Sample(), 1) is None
    assert SampleBounds(4, token_budget=2).drop(Sample(), 1) == Drop(
        "rejected", "dropped by TRL: longer than token_budget=2"
    )
