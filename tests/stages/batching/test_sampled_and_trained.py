"""Distributions of what was trained, dropped and sampled, in the metrics of each step."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import Batcher, SendChannel, SinkTrainer, TrainBatch, TrajectoryGroup, source
from penstock.accounting import Metrics
from penstock.testing import group


@dataclass(frozen=True)
class Alternate:
    """Sends long groups scored alike, and short ones that are not."""

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(4):
            long = number % 2 == 0
            rewards = [1.0, 1.0] if long else [0.0, 0.5]
            lengths = [8, 10] if long else [2, 4]
            await outbox.send(group(instance_id=str(number), rewards=rewards, completion_lengths=lengths))


class Trainer:
    def step(self, _: TrainBatch) -> dict[str, float]:
        return {}


async def steps(**rules: bool) -> list[dict[str, float]]:
    lines: list[dict[str, float]] = []
    metrics = Metrics(lambda values, _: lines.append(values))
    batcher = Batcher(max_tokens=1024, sequences=2, **rules)
    await source(Alternate()).then(batcher, capacity=1).sink(SinkTrainer(Trainer(), max_steps=2)).run(metrics=metrics)
    return lines


async def test_a_filter_that_drops_long_groups_shows_as_a_difference_of_sampled_and_trained() -> None:
    first, *_ = await steps(drop_zero_variance=True)

    assert [first[f"trained/length/{name}"] for name in ("mean", "min", "p10", "p50", "p90", "max")] == [
        3,
        2,
        2,
        2,
        2,
        4,
    ]
    assert first["dropped/length/mean"] == 9
    assert first["sampled/length/mean"] > first["trained/length/mean"] == first["response_length/mean"]
    assert first["sampled/reward/max"] == first["dropped/reward/mean"] == 1
    assert first["trained/reward/mean"] == first["reward"] == 0.25
    assert first["trained/age/max"] == first["staleness/max"]


async def test_without_a_filter_what_is_sampled_is_trained() -> None:
    for line in await steps():
        assert "dropped/length/mean" not in line
        assert line["sampled/length/mean"] == line["trained/length/mean"]
