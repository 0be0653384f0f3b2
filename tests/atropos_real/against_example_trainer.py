"""The example trainer of Atropos at AtroposTrainers: it trains its steps, ends by itself, and the ledger says the same.

Its model is a Qwen2 of one small layer with random weights. It trains in its mode without vLLM, which it tries to start
all the same, fails to, and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest
from tests.atropos_real.processes import Environment, run
from tests.failsafe import FAILSAFE_S
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from penstock import AdvantageNormalizer, SendChannel, TrajectoryGroup, current, source
from penstock.integrations.atropos import AtroposTrainers, ServerConfig

pytestmark = pytest.mark.timeout(600)

STEPS, SEQUENCES, GROUP = 3, 8, 4


@dataclass(frozen=True, slots=True)
class Groups:
    """A source of `count` groups, of one prompt and four completions each."""

    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.count):
            mask = [[False, False, *[True] * 6]] * GROUP
            made = TrajectoryGroup.build(
                env="letters",
                instance_id=str(number),
                sequences=[[5, 9, *range(10 + number, 16 + number)]] * GROUP,
                loss_mask=mask,
                behavior_logprobs=[np.where(row, -5.0, 0.0).tolist() for row in mask],
                rewards=[1.0, 0.0, 0.5, 0.0],
            )
            current().ledger.admit(made.id, made.rollout_ids.tolist())
            await outbox.send(made)


def save_model(folder: Path, tokenizer: Path) -> Path:
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    made: Any = Qwen2ForCausalLM(config)
    made.save_pretrained(folder)
    return folder


def trainer(url: str, model: Path, port: int, checkout: Path, folder: Path) -> Environment:
    """Start `python -m example_trainer.grpo` as its README has it; no other program may use `port`."""
    said = {
        "model-name": model,
        "device": "cpu",
        "optimizer": "adamw",
        "training-steps": STEPS,
        "batch-size": GROUP,
        "gradient-accumulation-steps": SEQUENCES // GROUP,
        "save-path": folder / "saved",
        "atropos-url": url,
        "vllm-port": port,
    }
    flags = [f"--{name}={value}" for name, value in said.items()]
    return run(["-m", "example_trainer.grpo", *flags], cwd=folder, folder=folder, path=checkout)


async def trained(
    groups: int, checkout: Path, workspace: Path, folder: Path, port: int
) -> tuple[Mapping[str, int], Environment]:
    trainers = AtroposTrainers(server=ServerConfig(port=0))
    pipeline = source(Groups(groups)).then(AdvantageNormalizer("grpo")).sink(trainers)
    model = save_model(folder / "model", workspace / "tokenizer")
    running: Environment | None = None
    with anyio.fail_after(2 * FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.run)
            running = trainer(await trainers.listening.url(), model, port, checkout, folder)
            try:
                await running.exit()
            finally:
                running.stop()
    assert running is not None
    assert pipeline.report is not None
    return pipeline.report.balance.ended, running


async def test_the_example_trainer_ends_with_success_after_the_last_batch(
    checkout: Path, workspace: Path, tmp_path: Path, free_tcp_port: int
) -> None:
    ended, running = await trained(STEPS * SEQUENCES // GROUP, checkout, workspace, tmp_path, free_tcp_port)

    assert running.process.returncode == 0, running.log.read_text()
    assert f"Step {STEPS}/{STEPS}" in running.log.read_text()
    assert ended["trained"] == sum(ended.values()) == STEPS * SEQUENCES


async def test_what_the_example_trainer_did_not_take_is_not_counted_as_trained(
    checkout: Path, workspace: Path, tmp_path: Path, free_tcp_port: int
) -> None:
    groups = (STEPS + 2) * SEQUENCES // GROUP

    ended, running = await trained(groups, checkout, workspace, tmp_path, free_tcp_port)

    assert running.process.returncode == 0, running.log.read_text()
    assert ended["trained"] == STEPS * SEQUENCES
    assert sum(ended.values()) == groups * GROUP
