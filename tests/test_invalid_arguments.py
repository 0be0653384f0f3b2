"""Every constructor answers an argument that it cannot use with `InvalidConfig`, which names the field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from penstock import AdvantageNormalizer, Batcher, RewardBridge, SinkTrainer, SourceEnv, TrainBatch
from penstock.data import Mixture, PromptDataset
from penstock.errors import InvalidConfig
from penstock.losses import CISPO, DPPO, GSPO, KL, SAPO, AdaptiveKL, PPOClip
from penstock.models import LoRA
from penstock.policies import NoOpPolicy, SamplingParams
from penstock.rewards import RewardFunction


class Counting:
    """A trainer that trains nothing."""

    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        return {"groups": len(batch.groups)}


MAKE: dict[str, Callable[[], Any]] = {
    "mode": partial(AdvantageNormalizer, "grop"),  # type: ignore[arg-type]
    "mode with preset": partial(AdvantageNormalizer, "maxrl", preset="verl"),
    "batch_groups": partial(AdvantageNormalizer, "batch"),
    "gamma": partial(AdvantageNormalizer, "gae", gamma=2.0),
    "clip": partial(AdvantageNormalizer, "grpo", clip=(1.0, -1.0)),
    "max_tokens": partial(Batcher, max_tokens=0),
    "max_steps": partial(SinkTrainer, Counting(), max_steps=0),
    "group_size": partial(SourceEnv, list, NoOpPolicy(), group_size=0),  # type: ignore[arg-type]
    "tokenizer": partial(RewardBridge.from_config, {"format_markers": [{"marker": "a", "reward": 1}]}),
    "functions": partial(RewardBridge, functions=[RewardFunction(len, name="score", reads_text=False)]),  # type: ignore[arg-type]
    "on_failure": partial(RewardFunction, len, name="a", on_failure="ignore"),  # type: ignore[arg-type]
    "split": partial(PromptDataset, [], split="test"),  # type: ignore[arg-type]
    "Mixture.weights": partial(Mixture, [], []),
    "temperature": partial(SamplingParams, temperature=-1),
    "rank": partial(LoRA, rank=0),
    "dropout": partial(LoRA, dropout=1.0),
    "clip_low": partial(PPOClip, 1.5, 0.2),
    "clip_low ": partial(GSPO, -1.0, 0.2),
    "lowest": partial(CISPO, 2.0, 3.0),
    "divergence": partial(DPPO, divergence="tw"),  # type: ignore[arg-type]
    "tau_pos": partial(SAPO, tau_pos=0.0),
    "estimator": partial(KL, "k4"),  # type: ignore[arg-type]
    "target": partial(AdaptiveKL, 0.1, -1.0),
}


@pytest.mark.parametrize("field", MAKE)
def test_an_argument_that_cannot_be_used_is_an_error_with_its_field(field: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        MAKE[field]()

    assert field.strip() in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
