"""The environment of examples/atropos_gateway.py that behaves like one of Atropos.

    PYTHONPATH=. python tests/atropos/guessing.py http://127.0.0.1:8000

Prints what became of its groups as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
from dataclasses import asdict

import aiohttp
from tests.atropos.environment import Config, Environment, Scored

GUESSES, STEPS, PACE = 8, 20, 0.02

POLLS_AN_EVALUATION = 5


class Guessing(Environment):
    """Asks for the digit after a given one, and guesses."""

    _polls = 0

    async def add_train_workers(self) -> None:
        """Cancel all workers sometimes, as environments do that evaluate."""
        self._polls += 1
        if self._polls % POLLS_AN_EVALUATION == 0:
            await self._cancel(len(self.workers))
        await super().add_train_workers()

    async def collect_trajectories(self, item: int) -> tuple[Scored | list[Scored] | None, list[int]]:
        """Guess several times at one prompt; a guess takes a while, so that some are cancelled."""
        await self._sleep(0.2)
        draw, digit = random.Random(item), item % 10  # noqa: S311 (guesses)
        said = [draw.randrange(10) for _ in range(GUESSES)]
        return {
            "tokens": [[digit, guess] for guess in said],
            "masks": [[-100, guess] for guess in said],
            "scores": [float(guess == (digit + 1) % 10) for guess in said],
            "inference_logprobs": [[1.0, math.log(0.1)]] * GUESSES,
            "messages": [
                [
                    {"role": "user", "content": f"Which digit comes after {digit}? Nine is followed by nought."},
                    {"role": "assistant", "content": str(guess)},
                ]
                for guess in said
            ],
            "advantages": [],
            "overrides": [],
            "group_overrides": {},
        }, []


if __name__ == "__main__":
    config = Config(
        rollout_server_url=sys.argv[1], wandb_name="guessing", group_size=GUESSES, total_steps=STEPS, pace=PACE
    )
    environment = Guessing(config)
    with contextlib.suppress(aiohttp.ClientConnectionError):  # the gateway ends with the last step
        asyncio.run(environment.env_manager())
    print(json.dumps(asdict(environment.counts)))  # noqa: T201
