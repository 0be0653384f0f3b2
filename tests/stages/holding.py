"""A rule for every stage: it holds no reference to a sent record while it waits for the next."""

import weakref

import anyio
from tests.stages.answers import Characters

from penstock import Context, Stage, TrajectoryGroup
from penstock.channels import memory_channel
from penstock.testing import entered

__all__ = ["lets_go_of_what_it_sent"]


async def lets_go_of_what_it_sent(stage: Stage[TrajectoryGroup, TrajectoryGroup], given: list[TrajectoryGroup]) -> None:
    """Send `given` to `stage`, receive its records, and assert that nothing holds their tokens; empties `given`."""
    count = len(given)
    feed, inbox = memory_channel[TrajectoryGroup](count)
    outbox, collected = memory_channel[TrajectoryGroup](count)
    tokens = [weakref.ref(one.tokens) for one in given]

    async with feed, inbox, outbox, collected, anyio.create_task_group() as tasks:
        with entered(Context(tokenizer=Characters())):
            tasks.start_soon(stage.run, inbox, outbox)
            while given:
                await feed.send(given.pop(0))
            await anyio.wait_all_tasks_blocked()
            for _ in tokens:
                collected.receive_nowait()
            assert [watch() for watch in tokens] == [None] * count
            tasks.cancel_scope.cancel()
