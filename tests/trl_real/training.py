"""AsyncGRPOTrainer as a user makes it: 16 sequences of 4 prompts a step, and the lines that plug penstock in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from penstock.integrations.trl import Rollouts, TRLTransfer, TRLWorker, flow_reward
from penstock.weights import WeightPublisher

OPTIONS: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "token_budget": 0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def synchronous_trainer_of(model: Path, folder: Path, rollouts: Rollouts, **options: Any) -> Any:
    """Return a GRPOTrainer of 16 sequences of 4 prompts a step, whose rollouts are those of a flow."""
    from datasets import Dataset  # noqa: PLC0415 (as below)

    trl = importlib.import_module("trl")
    given = {name: value for name, value in OPTIONS.items() if name != "token_budget"}
    return trl.GRPOTrainer(
        model=str(model),
        args=trl.GRPOConfig(output_dir=str(folder), num_generations=4, **given | options),
        train_dataset=Dataset.from_dict({"prompt": ["unused"] * 64}),
        reward_funcs=flow_reward,
        rollout_func=rollouts,
        callbacks=[rollouts.callback()],
    )


def trainer_of(model: Path, folder: Path, worker: TRLWorker, publisher: WeightPublisher, **options: Any) -> Any:
    """Return the trainer; `callbacks` among the options are called after the worker's."""
    from datasets import Dataset  # noqa: PLC0415 (a worker imports this file, and trains nothing)

    trl = importlib.import_module("trl.experimental.async_grpo")
    callbacks, peft_config = options.pop("callbacks", []), options.pop("peft_config", None)
    return trl.AsyncGRPOTrainer(
        model=str(model),
        args=trl.AsyncGRPOConfig(output_dir=str(folder), **OPTIONS | options),
        train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
        rollout_worker=worker,
        weight_transfer=TRLTransfer(publisher),
        peft_config=peft_config,
        callbacks=[worker.callback(), *callbacks],
    )
