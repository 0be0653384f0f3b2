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
    """Subtract `per_token` from the reward for each completion token past `free_tokens`."""

    per_token: float
    free_tokens: int = 512

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Subtract the penalty from every group; see `Stage`."""
        async for group in inbox:
            excess = np.maximum(0, group.completion_lengths() - self.free_tokens)
            await outbox.send(group.with_rewards(group.rewards - self.per_token * excess))


@dataclass(frozen=True, slots=True)
class Prompts:
    """A source of `count` synthetic groups; the second completion gets longer from prompt to prompt."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send the groups; see `Source`."""
        for number in range(self.count):
            await outbox.send(testing.group(instance_id=str(number), completion_lengths=[5, 6 + number]))


class Printer:
    """A sink that prints groups, and ends their trajectories in the ledger."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Print every group; see `Sink`."""
        async for group in inbox:
            lengths, rewards = group.completion_lengths().tolist(), group.rewards.tolist()
            print(f"prompt {group.instance_id}: lengths {lengths}, rewards {rewards}")
            drop(group, "filtered", "only printed")


async def main() -> None:
    """Run four groups through the stage. A chain that does not fit is a type error at the wrong line."""
    pipeline = source(Prompts(4)).then(LengthPenalty(per_token=0.25, free_tokens=7)).sink(Printer())
    await pipeline.run()


if __name__ == "__main__":
    anyio.run(main)
