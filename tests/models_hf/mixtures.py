"""Tiny mixtures of experts, whose routers choose two of four with equal logits: rounding decides which."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from penstock import TrainBatch, TrajectoryGroup, Worker
from penstock.losses import LossValue, Scored
from penstock.models import HFModel
from penstock.policies import Completion, SamplingParams
from penstock.torch import TorchPolicy, TorchTrainer

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

QWEN3: dict[str, Any] = {"mlp_only_layers": [1]}
"""Layers 0 and 2 have experts."""

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) * 7 % 300 + 1 for length in (4, 9, 6)]

SGD = partial(torch.optim.SGD, lr=0.1)


def write_mixture(folder: Path, kind: str = "qwen3_moe", **special: Any) -> Path:
    """Write a mixture into `folder`: four experts each have the same router weights, and others of their own."""
    config = transformers.AutoConfig.for_model(kind, **SMALL | special)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config)
        for name, parameter in model.named_parameters():
            parameter.data += torch.randn_like(parameter) * 0.1
            if name.endswith(("gate.weight", "router.weight")) and len(parameter) == SMALL["num_experts"]:
                parameter.data[:] = parameter.data[::4].repeat_interleave(4, dim=0)
        model.save_pretrained(folder)
    return folder


def disturbed(model: HFModel, scale: float = 1e-6) -> HFModel:
    """Change router weights of `model` by as little as rounding does."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return model


async def sampled(make: Callable[[], HFModel], prompts: list[Any] = PROMPTS, **options: Any) -> list[Completion]:
    """Return completions of 12 tokens with their experts, two of each prompt."""
    policy = TorchPolicy(make, eos_id=0, routed_experts=True, **options)
    async with policy.open(Worker()) as engine:
        return await engine.generate([p for p in prompts for _ in range(2)], SamplingParams(max_completion_tokens=12))


def present(column: Any) -> Any:
    assert column is not None
    return column


def batch_of(completions: list[Completion], prompts: list[Any] = PROMPTS) -> TrainBatch:
    """Return a batch of two completions of each prompt, with an advantage for each."""
    groups = []
    for number, prompt in enumerate(prompts):
        own = completions[2 * number : 2 * number + 2]
        masks = [np.repeat([0, 1], [len(prompt), len(each.tokens)]) for each in own]
        group = TrajectoryGroup.build(
            env="e",
            instance_id=str(number),
            sequences=[np.concatenate([prompt, each.tokens]) for each in own],
            loss_mask=masks,
            rewards=[0.0, 1.0],
            behavior_logprobs=[np.append(np.zeros(len(prompt)), present(each.logprobs)) for each in own],
            routed_experts=[present(each.routed_experts) for each in own],
        )
        groups.append(group.with_advantages([-1.0, 1.0]))
    return TrainBatch.pack(groups)


class Distance:
    """A loss of the policy's log-probabilities, that notes how far they are from those of the sampler."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.seen: list[torch.Tensor] = []
        self.behavior: list[torch.Tensor] = []

    def __call__(self, scored: Scored) -> LossValue:
        assert scored.behavior_logprobs is not None
        difference = scored.logprobs.detach() - scored.behavior_logprobs
        self.largest = max(self.largest, float(difference.abs().max()))
        self.seen.append(scored.logprobs.detach())
        self.behavior.append(scored.behavior_logprobs)
        assert scored.advantages is not None
        return LossValue(-(scored.logprobs * scored.advantages).sum() / scored.loss_tokens, {})


def stepped(model: HFModel, batch: TrainBatch, **options: Any) -> tuple[Distance, dict[str, float]]:
    """Train `model` on `batch` for a step, and return the loss, and the metrics."""
    loss = Distance()
    trainer = TorchTrainer(model, optimizer=SGD, loss=loss, **options)
    return loss, trainer.step(batch)
