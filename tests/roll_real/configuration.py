"""ROLL's own configuration for a run on a CPU, with a tag whose groups a flow samples."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from tests.trl_real.letters import COMPLETION, GROUP

GROUPS = 2
"""Groups of environments."""

BATCH = 16
"""Trajectories of a step: each group of environments gives two episodes."""

LENGTH = 24

ON_A_CPU = {"worker_cls": "tests.roll_real.on_a_cpu.EnvWorker", "llm_proxy": {"proxy_type": "router_on_a_cpu"}}


def config_of(
    model: Path,
    output: Path,
    *,
    tag: dict[str, Any],
    environments: dict[str, Any] | None = None,
    completion: int = COMPLETION,
    infer: str = "tests.roll_real.on_a_cpu.InferWorker",
    **changes: Any,
) -> Any:
    """Return an `AgenticConfig` for `model`, made of plain values as ROLL makes it of its YAML."""
    config_class = import_module("roll.pipeline.agentic.agentic_config").AgenticConfig
    groups = {"tags": ["letters"], "num_env_groups": GROUPS, "num_groups_partition": [GROUPS], "group_size": GROUP}
    trained = {**groups, **ON_A_CPU, **(environments or {})}
    sampling = {"max_new_tokens": completion, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_return_sequences": 1}
    values = {
        "exp_name": "letters",
        "seed": 3,
        "output_dir": str(output),
        "logging_dir": str(output / "logs"),
        "checkpoint_config": {"type": "file_system", "output_dir": str(output / "checkpoints")},
        "track_with": "stdout",
        "partial_gpu_mode": False,
        "num_gpus_per_node": 0,
        "num_nodes": 1,
        "max_steps": 100,
        "save_steps": 2,
        "eval_steps": 0,
        "rollout_batch_size": BATCH,
        "val_batch_size": BATCH,
        "sequence_length": LENGTH,
        "async_generation_ratio": 1,
        "ppo_epochs": 1,
        "adv_estimator": "grpo",
        "whiten_advantages": False,
        "use_kl_loss": False,
        "init_kl_coef": 0.0,
        "enable_old_logprobs_recompute": False,
        "reward_normalization": {"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "group"},
        "pretrain": str(model),
        "actor_infer": {
            "generating_args": sampling,
            "model_args": {"model_name_or_path": str(model)},
            "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
            "world_size": 1,
            "worker_cls": infer,
        },
        "actor_train": {
            "world_size": 1,
            "worker_cls": "tests.roll_real.on_a_cpu.TrainWorker",
            "model_args": {"model_name_or_path": str(model)},
            "training_args": {
                "learning_rate": 1e-2,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 4,
            },
        },
        "train_env_manager": trained,
        "val_env_manager": groups,
        "custom_envs": {"letters": {"env_type": "penstock", "max_steps": 1, "max_tokens_per_step": completion, **tag}},
        **changes,
    }
    config = import_module("dacite").from_dict(data_class=config_class, data=values)
    config.num_gpus_per_node = 0  # ROLL counts a CPU as one device, and asks Ray for it by a key that Ray refuses
    return config
