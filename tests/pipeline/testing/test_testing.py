"""The tools that tests are made of, tested."""

import anyio
import pytest

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, Worker, current, drop
from penstock.testing import VirtualClock, batch, drive, drive_sink, drive_source, group, trajectory


class Double:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            current().metrics.mean("reward", record.rewards)
            if record.rewards[0] < 0:
                drop(record, "filtered", "negative")
            else:
                await outbox.send(record.with_rewards(record.rewards * 2))


class Raises:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        raise ValueError(f"from within {len([inbox, outbox])} ends")


class Endless:
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        number = current().worker.index
        while True:
            await outbox.send(group(instance_id=str(number)))
            number += 1


class Count:
    def __init__(self) -> None:
        self.seen = 0

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for record in inbox:
            self.seen += len(record)


async def test_driving_a_stage_returns_its_records_ledger_and_metrics() -> None:
    out = await drive(Double(), [group(rewards=[1, 3]), group(rewards=[-1, 0], instance_id="1")])

    assert [record.rewards.tolist() for record in out] == [[2.0, 6.0]]
    assert out.ledger.balance().reasons["filtered"] == {"negative": 2}
    assert out.metrics.emit(1)["reward"] == 0.75


async def test_what_a_stage_raises_comes_out_as_it_was_raised() -> None:
    with pytest.raises(ValueError, match="from within"):
        await drive(Raises(), [group()])


async def test_an_endless_source_is_cut_at_the_limit() -> None:
    out = await drive_source(Endless(), limit=3, worker=Worker(index=5))
    assert [record.instance_id for record in out] == ["5", "6", "7"]


async def test_a_sink_is_driven_to_the_end() -> None:
    sink = Count()
    await drive_sink(sink, [group(), group(instance_id="1")])
    assert sink.seen == 4


def test_builders_give_checked_records() -> None:
    assert group(completion_lengths=[1, 2], prompt_length=3).lengths().tolist() == [4, 5]
    assert trajectory(completion_len=6).loss_mask.sum() == 6
    assert len(batch(groups=3)) == 6
    batch(groups=3).columns()


def test_virtual_time_passes_in_order_and_costs_none() -> None:
    clock, order = VirtualClock(), list[tuple[str, float]]()

    async def sleeper(name: str, seconds: float) -> None:
        await anyio.sleep(seconds)
        order.append((name, clock.now_s))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleeper, "late", 3600)
            tasks.start_soon(sleeper, "early", 60)
        with anyio.move_on_after(10) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught

    clock.run(main)

    assert order == [("early", 60.0), ("late", 3600.0)]
    assert clock.now_s == 3610.0
