"""SkyRL's trainers as its experiment makes them: 4 prompts, of which 4 sequences each, a step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tests.skyrl_real.on_a_cpu import CPUDispatch

from penstock._stages.integrations.skyrl.entry import experiment

SkyRLTrainConfig: Any = importlib.import_module("skyrl.train.config").SkyRLTrainConfig
PromptDataset: Any = importlib.import_module("skyrl.train.dataset").PromptDataset
validate_cfg: Any = importlib.import_module("skyrl.train.utils").validate_cfg

OPTIONS: dict[str, Any] = {
    "trainer.placement.colocate_all": False,
    "trainer.algorithm.use_kl_loss": False,
    "trainer.train_batch_size": 4,
    "trainer.policy_mini_batch_size": 4,
    "trainer.micro_train_batch_size_per_gpu": 16,
    "trainer.micro_forward_batch_size_per_gpu": 16,
    "trainer.max_prompt_length": 16,
    "trainer.epochs": 1,
    "trainer.eval_interval": -1,
    "trainer.eval_before_train": False,
    "trainer.ckpt_interval": -1,
    "trainer.hf_save_interval": -1,
    "trainer.resume_mode": "none",
    "trainer.logger": "console",
    "generator.inference_engine.enable_ray_prometheus_stats": False,
    "generator.n_samples_per_prompt": 4,
    "generator.sampling_params.max_generate_length": 6,
    "generator.max_input_length": 16,
    "environment.env_class": "letters",
    "data.dataloader.num_workers": 0,
}

FULLY_ASYNC: dict[str, Any] = {
    "trainer.fully_async.enabled": True,
    "trainer.fully_async.max_staleness_steps": 1,
    "trainer.fully_async.num_parallel_generation_workers": 8,
    "trainer.algorithm.policy_loss_type": "rollout_is",
}


def config_of(model: Path, data: Path, folder: Path, **options: Any) -> Any:
    """Return a configuration that SkyRL's own validation accepts."""
    paths = {
        "trainer.policy.model.path": str(model),
        "data.train_data": [str(data)],
        "data.val_data": [str(data)],
        "trainer.ckpt_path": str(folder / "checkpoints"),
        "trainer.export_path": str(folder / "exports"),
        "trainer.log_path": str(folder / "logs"),
    }
    cfg = SkyRLTrainConfig.from_cli_overrides(OPTIONS | paths | options)
    validate_cfg(cfg)
    return cfg


def experiment_of(cfg: Any, named: str) -> Any:
    """Return an experiment of ours, which reads its data in this process."""
    base: Any = experiment(named)

    class Experiment(base):  # type: ignore[misc]  # of SkyRL, which is untyped here
        def get_train_dataset(self) -> Any:
            return PromptDataset(cfg.data.train_data, self.tokenizer, cfg.trainer.max_prompt_length, num_workers=1)

        def get_eval_dataset(self) -> Any:
            return self.get_train_dataset() if cfg.trainer.eval_interval > 0 else None

    return Experiment(cfg)


def trainer_of(cfg: Any, named: str) -> Any:
    """Return the trainer of an experiment of ours, as SkyRL makes it, with workers on a CPU."""
    made = experiment_of(cfg, named)
    client = made.get_inference_client()
    trainer = made.get_trainer(
        cfg=cfg,
        tracker=made.get_tracker(),
        tokenizer=made.tokenizer,
        train_dataset=made.train_dataset,
        eval_dataset=made.eval_dataset,
        inference_engine_client=client,
        generator=made.get_generator(cfg, made.tokenizer, client),
        colocate_pg=made.colocate_pg,
    )
    trainer.dispatch = CPUDispatch(cfg)
    return trainer
