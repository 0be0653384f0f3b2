"""Send groups from one process to another over shared memory.

    python examples/two_processes.py

The reader serves a channel and starts a copy of this script as the sampler. The columns of a group are written once, to
a shared-memory segment that the sampler owns; the message is a descriptor of some twenty bytes. The arrays that the
reader receives are views of that segment. A span is released when the last view of it is freed.
"""

from __future__ import annotations

import sys

import anyio
import numpy as np

from penstock import TrajectoryGroup
from penstock.channels import connect, serve

GROUPS = 1000
COMPLETIONS = 8
TOKENS = 1024


def sample_group(number: int, random: np.random.Generator) -> TrajectoryGroup:
    """Return eight completions of 1,024 random tokens each; the first token is the prompt."""
    loss_mask = np.ones((COMPLETIONS, TOKENS), np.bool_)
    loss_mask[:, 0] = False
    return TrajectoryGroup.build(
        env="random",
        instance_id=str(number),
        tokens=random.integers(0, 50_000, COMPLETIONS * TOKENS, dtype=np.int32),
        offsets=np.arange(COMPLETIONS + 1) * TOKENS,
        loss_mask=loss_mask.ravel(),
        rewards=random.random(COMPLETIONS, dtype=np.float32),
    )


async def sample(url: str) -> None:
    """Connect, send the groups, and exit when all have arrived: the sampling process."""
    random = np.random.default_rng(seed=0)
    async with connect(url, TrajectoryGroup, name="sampler") as outbox:
        for number in range(GROUPS):
            await outbox.send(sample_group(number, random))


async def read() -> None:
    """Serve a channel, start the sampler, and count the groups: the reading process."""
    trajectories = tokens = 0
    async with serve("shm://", TrajectoryGroup, capacity=16, capacity_bytes=4 * 2**20) as inbox:
        async with await anyio.open_process([sys.executable, __file__, inbox.url], stdout=None, stderr=None) as sampler:
            async for group in inbox:
                trajectories += len(group)
                tokens += len(group.tokens)
        print(f"{trajectories} trajectories, {tokens} tokens; the sampler exited with {sampler.returncode}")


if __name__ == "__main__":
    anyio.run(sample, sys.argv[1]) if len(sys.argv) > 1 else anyio.run(read)
