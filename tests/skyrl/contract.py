"""The interfaces of SkyRL 0.4.0 that penstock implements or uses, recorded from it; `make test-skyrl` compares them."""

from __future__ import annotations

import inspect
from typing import Any

OUTPUT = {
    *("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics"),
    *("rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "trajectory_time_splits"),
    *("rollout_expert_indices", "rollout_sample_support", "is_last_step", "env_metrics"),
    *("pixel_values", "image_grid_thw"),
}
"""The keys of GeneratorOutput (train/generators/base.py:46)."""

INPUT = {"prompts", "env_classes", "env_extras", "sampling_params", "trajectory_ids", "batch_metadata"}
"""The keys of GeneratorInput (train/generators/base.py:37)."""

VLLM_PARAMETERS = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 1024,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
}
"""What SkyRL makes of its default sampling parameters (backends/skyrl_train/inference_servers/engine_utils.py:55)."""

ENGINE = {
    *("model_name", "generate", "get_endpoint_url", "chat_completion", "render_chat_completion", "completion"),
    *("wake_up", "sleep", "update_named_weights", "load_lora_adapter", "teardown", "reset_prefix_cache"),
    *("pause_generation", "resume_generation", "finish_session", "get_world_size"),
}
"""The abstract members of InferenceEngineInterface (backends/skyrl_train/inference_servers/base.py:60)."""

HOOKS = {
    "train": [],
    "init_weight_sync_state": [],
    "convert_to_training_input": ["generator_output", "uids"],
    "save_checkpoints": [],
    "load_checkpoints": [],
}
"""The methods of both trainers that are extended, with their arguments (train/trainer.py)."""

ASYNC_HOOKS = {
    "_collect_generation_mini_batch": ["generation_output_group_buffer", "all_generators_done"],
    "convert_generation_group_mini_batch_to_training_input": ["cur_generation_group_mini_batch", "dropped_groups"],
}
"""Those of the fully asynchronous one (train/fully_async_trainer.py)."""


def arguments_of(owner: Any, names: Any) -> dict[str, list[str]]:
    """Return the methods of these names, with the names of their arguments."""
    return {name: list(inspect.signature(getattr(owner, name)).parameters)[1:] for name in names}
