"""An environment worker of `stress`: sends groups of which no two are the same, and writes a hash of each sample.

    python -m tests.atropos_skyrl_real.stress_sender URL shm 31250 64 0 hashes

The arguments are those of `Work`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from benchmarks.atropos_clients import GROUP, as_atropos, by_shm
from tests.atropos_skyrl_real.hashes import digest

CONCURRENCY = 4
"""Groups that a worker sends at a time."""

WAYS = {"shm": by_shm, "http": as_atropos}
REASONS = ("stop", "length")
WORDS = 128_000


def group(draw: np.random.Generator, longest: int) -> tuple[dict[str, Any], list[bytes]]:
    """Return a group as an environment has it, lists of Python numbers, and the hashes of its samples."""
    length, scores = int(draw.integers(longest // 2, longest + 1)), draw.random(GROUP, np.float32)
    prompt, reasons = length // 4, draw.integers(0, len(REASONS), GROUP)
    tokens = draw.integers(0, WORDS, (GROUP, length)).astype(np.int32)
    trains = np.arange(length) >= prompt
    logprobs = np.where(trains, -draw.random((GROUP, length), np.float32), np.float32(0))
    scored = {
        "tokens": tokens.tolist(),
        "masks": np.where(trains, tokens, -100).tolist(),
        "scores": scores.tolist(),
        "inference_logprobs": np.where(trains, logprobs, np.float32(1)).tolist(),
        "overrides": [{"finish_reason": REASONS[reason]} for reason in reasons],
    }
    rows = zip(tokens, logprobs, scores.tolist(), reasons, strict=True)
    return scored, [digest(row, trains, own, score, REASONS[reason]) for row, own, score, reason in rows]


class Work(NamedTuple):
    """What a worker sends."""

    url: str
    """Of the gateway."""
    way: str
    groups: int
    longest: int
    """Tokens of the longest sequence."""
    number: int
    """Of this worker."""
    file: str
    """The hashes of what was sent."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Work:
        """Return the work that a command line describes."""
        url, way, groups, longest, number, file = arguments
        return cls(url, way, int(groups), int(longest), int(number), file)


async def send(work: Work) -> None:
    """Register, send, and write the hashes of what was sent."""
    url = work.url
    async with aiohttp.ClientSession() as session:
        fields = {"max_token_length": work.longest, "desired_name": "stress", "weight": 1.0, "group_size": GROUP}
        async with session.post(f"{url}/register-env", json=fields) as response:
            env_id = (await response.json())["env_id"]
    draw, numbers, hashes = np.random.default_rng(work.number), count(), list[bytes]()
    async with WAYS[work.way](url, env_id) as post:

        async def send_next() -> None:
            while next(numbers) < work.groups:
                scored, found = group(draw, work.longest)
                hashes.extend(found)
                await post(scored)

        await asyncio.gather(*(send_next() for _ in range(CONCURRENCY)))
        await asyncio.to_thread(Path(work.file).write_bytes, b"".join(hashes))
        await asyncio.to_thread(sys.stdin.read)  # a connection that ends early would count what waits in it as lost


if __name__ == "__main__":
    asyncio.run(send(Work.of(sys.argv[1:])))
