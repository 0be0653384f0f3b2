"""Train a policy with an environment for Atropos, which runs in a separate process.

    python examples/atropos_gateway.py                       # or the path of another environment that guesses

The gateway serves the HTTP API for which atropos/guessing_environment.py was written; the environment is unchanged and
gets only the gateway's URL. Its groups become records, rewards are shaped, groups are normalised and packed. The policy
is a table of logits, with one row for each digit. It learns from guesses that it did not sample, each weighted by its
probability under the current policy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import numpy as np

from penstock import AdvantageNormalizer, Batcher, RewardBridge, SinkTrainer, TrainBatch, source
from penstock.integrations.atropos import AtroposGateway, ServerConfig

STEPS = 20
SEQUENCES = 64
"""Sequences in a batch."""
LEARNING_RATE = 0.5
ENVIRONMENT = Path(__file__).parent / "atropos" / "guessing_environment.py"


class Table:
    """A policy over ten digits, with its trainer."""

    def __init__(self) -> None:
        self.logits = np.zeros((10, 10))

    def probabilities(self) -> np.ndarray:
        """Return [digit, guess] the probabilities of the policy."""
        shifted = np.exp(self.logits - self.logits.max(axis=1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Follow the policy gradient of one batch, every guess weighted by its importance ratio."""
        assert batch.advantages is not None  # noqa: S101 (set by the normalizer and the environment)
        assert batch.behavior_logprobs is not None  # noqa: S101
        last = batch.cu_seqlens[1:] - 1
        digits, guesses = batch.tokens[last - 1], batch.tokens[last]
        policy = self.probabilities()
        ratio = policy[digits, guesses] / np.exp(batch.behavior_logprobs[last])
        weight = np.minimum(ratio, 5.0) * batch.advantages[last]
        np.add.at(self.logits, digits, LEARNING_RATE * weight[:, None] * (np.eye(10)[guesses] - policy[digits]))
        return {"right": float(self.probabilities()[np.arange(10), (np.arange(10) + 1) % 10].mean())}


async def run_environment(path: Path, gateway: AtroposGateway) -> None:
    """Start the environment once the gateway listens."""
    command = [sys.executable, str(path), await gateway.listening.url()]
    await anyio.run_process(command, stdout=None, stderr=None)


async def main(environment: Path) -> None:
    """Run the pipeline, and the environment beside it."""
    table = Table()
    gateway = AtroposGateway(batch_size=SEQUENCES, max_token_len=16, num_steps=STEPS, server=ServerConfig(port=0))
    pipeline = (
        source(gateway)
        .then(RewardBridge.from_config({"clip": [0, 1]}))
        .then(AdvantageNormalizer("grpo"))
        .then(Batcher(max_tokens=1024, sequences=SEQUENCES))
        .sink(SinkTrainer(table, max_steps=STEPS))
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_environment, environment, gateway)
        await pipeline.run()
    right = table.probabilities()[np.arange(10), (np.arange(10) + 1) % 10].mean()
    print(f"{STEPS} steps; {right:.0%} of the guesses are right")


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]) if sys.argv[1:] else ENVIRONMENT)
