"""AsyncGRPOTrainer as a user makes it: 16 sequences of 4 prompts a step, and the lines that plug penstock in."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from penstock.integrations.trl import TRLTransfer, TRLWorker
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


def trainer_of(model: Path, folder: Path, worker: TRLWorker, publisher: WeightPublisher, **options: Any) -> Any:
    """Return the trainer; `callbacks` among the options are called after that of the worker."""
    from datasets import Dataset  # noqa: PLC0415 (a worker imports this file, and trains nothing)

    trl = importlib.import_module("trl.experimental.async_grpo")
    callbacks = options.pop("callbacks", [])
    return trl.AsyncGRPOTrainer(
        model=str(model),
        args=trl.AsyncGRPOConfig(output_dir=str(folder), **OPTIONS | options),
        train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
        rollout_worker=worker,
        weight_transfer=TRLTransfer(publisher),
        callbacks=[worker.callback(), *callbacks],
    )
