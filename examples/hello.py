"""Send groups from one task to another through a memory channel.

    python examples/hello.py

A group holds all completions of one prompt. The channel is bounded: with a capacity of 1, the sender waits until the
receiver has received the previous group.
"""

from __future__ import annotations

import anyio
import numpy as np

from penstock import ReceiveChannel, SendChannel, StopReason, TrajectoryGroup
from penstock.channels import memory_channel

PROMPT = [5, 6, 7]
"""Token ids of "2 + 2 =", in a vocabulary made up for this example."""
RIGHT = 4
"""The token that answers it."""


def sample_group(number: int, random: np.random.Generator) -> TrajectoryGroup:
    """Return four completions of one token each: guesses, with reward 1.0 for a right one."""
    guesses = random.integers(3, 6, size=4)
    return TrajectoryGroup.build(
        env="two_plus_two",
        instance_id=str(number),
        sequences=[[*PROMPT, guess] for guess in guesses],
        loss_mask=[[False, False, False, True]] * 4,
        rewards=guesses == RIGHT,
        stop_reasons=[StopReason.STOP] * 4,
    )


async def sampler(outbox: SendChannel[TrajectoryGroup]) -> None:
    """Send three groups, then end the stream by closing the channel."""
    random = np.random.default_rng(seed=0)
    async with outbox:
        for number in range(3):
            await outbox.send(sample_group(number, random))


async def reader(inbox: ReceiveChannel[TrajectoryGroup]) -> None:
    """Print the groups until the stream ends."""
    async with inbox:
        async for group in inbox:
            print(f"group {group.instance_id}: {len(group)} trajectories, rewards {group.rewards.tolist()}")


async def main() -> None:
    """Run both ends."""
    outbox, inbox = memory_channel[TrajectoryGroup](capacity=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sampler, outbox)
        tasks.start_soon(reader, inbox)


if __name__ == "__main__":
    anyio.run(main)
