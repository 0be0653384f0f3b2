"""An unknown key that another library has is answered with the key that has its meaning here."""

from __future__ import annotations

from typing import Any

import pytest

from penstock._schemas.field_types import paths_in
from penstock._stages.training_run.other_names import TRL, VALUES, VERL
from penstock.errors import InvalidConfig
from penstock.runs import RunConfig, load_run_config

LEAST: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "reward": {}}


def refusal(*overrides: str, **values: Any) -> str:
    with pytest.raises(InvalidConfig) as refused:
        load_run_config(LEAST | values, overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        # TRL
        ("learning_rate=1e-6", "here it is algorithm.optimizer.lr"),
        ("algorithm.learning_rate=1e-6", "here it is algorithm.optimizer.lr"),
        ("algorithm.optimizer.learning_rate=1e-6", "here it is algorithm.optimizer.lr"),
        ("num_generations=8", "here it is algorithm.group_size"),
        ("model.lora.r=8", "here it is model.lora.rank"),
        ("model.lora={r: 8, alpha: 16}", "here it is model.lora.rank"),
        ("model.lora.target_modules=[q_proj]", "here it is model.lora.targets"),
        ("max_completion_length=256", "here it is sampling.max_completion_tokens"),
        ("algorithm.beta=0.04", "here it is algorithm.kl"),
        ("algorithm.epsilon_high=0.28", "here it is algorithm.clip"),
        ("output_dir=out", "here it is folder"),
        ("report_to=wandb", "here it is trackers"),
        ("bf16=true", "here it is model.precision"),
        # verl
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is algorithm.optimizer.lr"),
        ("actor_rollout_ref.model.path=m", "here it is model.path"),
        ("actor_rollout_ref.rollout.n=8", "here it is algorithm.group_size"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "here it is algorithm.clip"),
        ("algorithm.adv_estimator=grpo", "here it is algorithm.advantages"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "here it is algorithm.kl"),
        ("data.train_files=d.parquet", "here it is data.path"),
        ("data.max_response_length=256", "here it is sampling.max_completion_tokens"),
        ("trainer.total_epochs=3", "here it is algorithm.steps"),
        ("trainer.logger=[console, wandb]", "here it is trackers"),
        ("placement.trainer=cuda:0", "here it is placement.device"),
        # our own, in another section
        ("steps=100", "did you mean algorithm.steps?"),
        ("lr=1e-6", "did you mean algorithm.optimizer.lr?"),
        ("algorithm.lr=1e-6", "did you mean algorithm.optimizer.lr?"),
        ("algorithm.folder=run", "did you mean folder?"),
        ("model.rank=8", "did you mean model.lora.rank?"),
        ("reward.concurrency=8", "did you mean reward.functions[].concurrency?"),
        # values
        ("algorithm.loss=grpo", "here it is algorithm.advantages=grpo, with loss ppo"),
        ("algorithm.loss=dapo", "here it is algorithm.clip=[0.2, 0.28] and"),
        ("algorithm.advantages=reinforce_plus_plus", "here it is algorithm.advantages=reinforce++"),
        ("model.precision=bf16", "here it is model.precision=bfloat16"),
        ("engine=hf", "here it is engine=torch"),
        # mistyped
        ("algorithm.stepz=3", "did you mean 'steps'?"),
        ("algoritm.steps=3", "did you mean 'algorithm'?"),
        ("algorithm.loss=pppo", "did you mean 'ppo'?"),
    ],
)
def test_a_name_of_another_library_is_answered_with_ours(override: str, advice: str) -> None:
    assert refusal(override).endswith(advice) or f"; {advice}" in refusal(override)


@pytest.mark.parametrize(("theirs", "ours"), (TRL | VERL).items())
def test_every_key_of_the_table_leads_to_one_of_ours(theirs: str, ours: str) -> None:
    assert ours.removesuffix("[]") in paths_in((RunConfig,))

    assert f"here it is {ours}" in refusal(f"{theirs}=x")


@pytest.mark.parametrize("value", VALUES)
def test_every_value_of_the_table_is_answered(value: str) -> None:
    assert f"here it is {VALUES[value]}" in refusal(value)
