"""Losses and advantages of TRL: the real methods of its trainers, with only those attributes that they read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import imported
from torch import Tensor

__all__ = ["TRL", "completions", "corrected", "in_float64", "loss_of", "trainer", "value_of"]

TRL = imported("trl")

ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing_kwargs": None,
    "per_device_train_batch_size": 1,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}

ATTRIBUTES = {
    "aux_loss_enabled": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": 20,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "entropy_coef": 0.0,
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "_tokenizer": SimpleNamespace(pad_token_id=0),
    "pad_to_multiple_of": None,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "num_generations": 2,
    "multi_objective_aggregation": "sum_then_normalize",
    "scale_rewards": "group",
    "log_multimodal": False,
}


class Alone:
    """The accelerator of one process."""

    num_processes = 1
    process_index = 0
    device = torch.device("cpu")
    sync_gradients = True
    is_main_process = True

    def gather(self, value: Tensor) -> Tensor:
        """Return the value of the only process."""
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:  # noqa: ARG002 (as accelerate's)
        """Return the value of the only process."""
        return value

    def pad_across_processes(self, value: Tensor, **_: Any) -> Tensor:
        """Return the value of the only process."""
        return value


def trainer(name: str = "grpo", **options: Any) -> Any:
    """Return a `GRPOTrainer`, or an `RLOOTrainer`, that was not initialised, with what its methods read."""
    kind = TRL.get(f"trl.trainer.{name}_trainer", f"{name.upper()}Trainer")
    made = object.__new__(kind)
    given = ARGS | {each: options.pop(each) for each in list(options) if each in ARGS}
    made.__dict__.update(ATTRIBUTES, accelerator=Alone(), args=SimpleNamespace(**given), **collecting())
    made.__dict__.update(options)
    return made


def collecting() -> dict[str, Any]:
    """Return the attributes to which a trainer appends what it logs."""
    logs = defaultdict[str, Any](list, rewards=defaultdict(list), extra=defaultdict(list))
    pending: dict[str, Any] = {"_pending_extra_logs": {}, "_pending_metrics": {}}
    return {"_metrics": {"train": defaultdict(list)}, "_logs": logs, "model": Model(), **pending}


class Model(torch.nn.Module):
    """A model in training, of which a trainer asks nothing else here."""

    is_gradient_checkpointing = False


@contextmanager
def in_float64() -> Iterator[None]:
    """Have tensors made of lists in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def completions(made: Any, batch: Batch, rewards: Tensor) -> dict[str, Any]:
    """Return what `_generate_and_score_completions` makes of a batch with `rewards` [B, number of functions]."""
    rows, longest = batch.mask.shape
    prompts, ids, texts = [[1]] * rows, [[1] * longest] * rows, [""] * rows
    more: tuple[Any, ...] = (batch.mask.long().tolist(), texts, batch.rollout.tolist(), {}, None, None)
    made.__dict__.update(
        _generate=lambda _: (prompts, ids, *(more if "GRPO" in type(made).__name__ else [texts])),
        _calculate_rewards=lambda *_: rewards,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.old, None, None),
        reward_weights=made.__dict__.get("reward_weights", torch.ones(rewards.shape[1])),
        reward_funcs=[None] * rewards.shape[1],
        reward_func_names=[str(each) for each in range(rewards.shape[1])],
    )
    with in_float64():
        scored: dict[str, Any] = made._generate_and_score_completions([{"prompt": ""}] * rows)
    return scored


def loss_of(kind: str, old: str = "old", *, entropies: Tensor | None = None, **options: Any) -> Peer:
    """Return the loss of `loss_type` `kind`; `entropies` [B, L] are those of the tokens."""
    return lambda batch: value_of(trainer(loss_type=kind, **options), batch, old, entropies)


def value_of(made: Any, batch: Batch, old: str = "old", entropies: Tensor | None = None, **more: Any) -> Tensor:
    """Return what `_compute_loss` returns for a batch."""
    given = torch.zeros_like(batch.new) if entropies is None else entropies
    made.__dict__["_get_per_token_logps_and_entropies"] = lambda *_, **__: (batch.new, given, None)
    nothing = torch.zeros(batch.sequences, 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": batch.mask.long(),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": getattr(batch, old),
        "sampling_per_token_logps": batch.rollout,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
        **more,
    }
    value: Tensor = made._compute_loss(made.model, inputs)
    return value


def corrected(mode: str, low: float | None, high: float) -> Peer:
    """Return DAPO's loss with the importance weights of vLLM's samples."""

    def loss(batch: Batch) -> Tensor:
        correction: dict[str, Any] = {"mode": mode, "clip_min": low, "clip_max": high}
        made = trainer(
            loss_type="dapo",
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            epsilon_high=0.3,
            **{f"vllm_importance_sampling_{name}": value for name, value in correction.items()},
        )
        scored = completions(made, batch, torch.zeros(batch.sequences, 1))
        return value_of(made, batch, importance_sampling_ratio=scored["importance_sampling_ratio"])

    return loss
