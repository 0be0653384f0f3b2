"""Sequences as an environment sent them and as a trainer had them, in a form in which they can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
import numpy as np
from tests.atropos_real.processes import Environment
from tests.failsafe import FAILSAFE_S

from penstock import AdvantageNormalizer, Batcher, SinkTrainer, TrainBatch, source
from penstock.integrations.atropos import AtroposGateway, ServerConfig

__all__ = ["Recorder", "Sequence", "gateway_for", "sent_sequences", "train_on"]

Sequence: TypeAlias = tuple[bytes, bytes, bytes | None, bytes | None, float]
"""Tokens, loss mask, log-probabilities, advantages of the environment's own, reward."""

STEPS, SEQUENCES, LONGEST = 3, 8, 8192


@dataclass
class Recorder:
    """In place of a TorchTrainer: it keeps what it was given."""

    own_advantages: bool = False
    sequences: Counter[Sequence] = field(default_factory=Counter)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        for index, (begin, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            mask = batch.loss_mask[begin:end]
            logprobs, advantages = batch.behavior_logprobs, batch.advantages if self.own_advantages else None
            self.sequences[
                batch.tokens[begin:end].astype(np.int32).tobytes(),
                mask.tobytes(),
                None if logprobs is None else logprobs[begin:end].tobytes(),
                None if advantages is None else advantages[begin:end].tobytes(),
                float(batch.rewards[index]),
            ] += 1
        return {}


def sent_sequences(groups: Iterable[Mapping[str, Any]]) -> Counter[Sequence]:
    """Return each sequence of what an environment sent, as `Recorder` has it."""
    found: Counter[Sequence] = Counter()
    for group in groups:
        for index, tokens in enumerate(group["tokens"]):
            mask = np.array(group["masks"][index]) != -100
            logprobs, advantages = group.get("inference_logprobs"), group.get("advantages")
            found[
                np.array(tokens, np.int32).tobytes(),
                mask.tobytes(),
                np.where(mask, logprobs[index], 0).astype(np.float32).tobytes() if logprobs else None,
                np.array(advantages[index], np.float32).tobytes() if advantages else None,
                float(np.float32(group["scores"][index])),
            ] += 1
    return found


def gateway_for(steps: int = STEPS, **options: Any) -> AtroposGateway:
    return AtroposGateway(
        batch_size=SEQUENCES, max_token_len=LONGEST, num_steps=steps, server=ServerConfig(port=0), **options
    )


async def train_on(gateway: AtroposGateway, trainer: Any, environment: Any, steps: int = STEPS) -> Environment:
    """Run a pipeline on what `environment(url)` sends, to the last step; return the environment, which has ended.

    Raises:
        AssertionError: it did not end by itself and with success, or less was trained; with what it printed.
    """
    pipeline = (
        source(gateway)
        .then(AdvantageNormalizer("grpo"))
        .then(Batcher(max_tokens=SEQUENCES * LONGEST, sequences=SEQUENCES))
        .sink(SinkTrainer(trainer, max_steps=steps))
    )
    running: Environment | None = None
    with anyio.fail_after(2 * FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            running = environment(await gateway.listening.url())
            assert isinstance(running, Environment)
            try:
                if await running.exit():
                    tasks.cancel_scope.cancel()
            finally:
                running.stop()
    assert running is not None
    assert running.process.returncode == 0, running.log.read_text()[-4000:]
    assert pipeline.report is not None
    assert pipeline.report.balance.ended["trained"] == steps * SEQUENCES, running.log.read_text()[-4000:]
    return running
