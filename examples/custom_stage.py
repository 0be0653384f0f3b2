"""Write your own stage: any object with one coroutine that receives from an inbox and sends to an outbox.

    python examples/custom_stage.py

test_custom_stage.py tests the stage without a pipeline, a process or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import numpy as np

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup, drop, source, testing


@dataclass(frozen=True, slots=True)
class LengthPenalty:
    """Take `per_token` off the reward for each completion token past `free_tokens`."""

    per_token: float
    free_tokens: int = 512

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`."""
        async for group in inbox:
            excess = np.maximum(0, group.completion_lengths() - self.free_tokens)
            await outbox.send(group.with_rewards(group.rewards - self.per_token * excess))


@dataclass(frozen=True, slots=True)
class Prompts:
    """A source of `count` made-up groups; the second completion gets longer from prompt to prompt."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Source`."""
        for number in range(self.count):
            await outbox.send(testing.group(instance_id=str(number), completion_lengths=[5, 6 + number]))


class Printer:
    """A sink that prints, and says in the ledger what became of the trajectories."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """See `Sink`."""
        async for group in inbox:
            lengths, rewards = group.completion_lengths().tolist(), group.rewards.tolist()
            print(f"prompt {group.instance_id}: lengths {lengths}, rewards {rewards}")
            drop(group, "filtered", "only looked at")


async def main() -> None:
    """Four groups through the stage. A chain that does not fit is a type error at the line that is wrong."""
    pipeline = source(Prompts(4)).then(LengthPenalty(per_token=0.25, free_tokens=7)).sink(Printer())
    await pipeline.run()


if __name__ == "__main__":
    anyio.run(main)
