"""Losses of TRL: the real `GRPOTrainer._compute_loss`, of a trainer with only what this method reads."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from tests.oracles_real.batches import Batch, Peer
from tests.oracles_real.release import imported
from torch import Tensor

__all__ = ["GRPO", "TRL", "loss_of", "trainer"]

TRL = imported("trl")
GRPO = "trl.trainer.grpo_trainer"

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
}


class Alone:
    """The accelerator of one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        """Return the value of the only process."""
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:  # noqa: ARG002 (as accelerate's)
        """Return the value of the only process."""
        return value


def trainer(**options: Any) -> Any:
    """Return a trainer that was not initialised, with what `_compute_loss` reads."""
    kind = TRL.get(GRPO, "GRPOTrainer")
    made = object.__new__(kind)
    made.__dict__.update(ATTRIBUTES, accelerator=Alone(), _metrics={"train": defaultdict(list)})
    made.__dict__["model"] = SimpleNamespace(training=True)
    made.__dict__["args"] = SimpleNamespace(**ARGS | {name: options.pop(name) for name in list(options) if name in ARGS})
    made.__dict__.update(options)
    return made


def loss_of(
    kind: str, old: str = "old", *, entropies: Tensor | None = None, weights: Tensor | None = None, **options: Any
) -> Peer:
    """Return the loss of `loss_type` `kind`; `entropies` [B, L] are those of the tokens."""

    def loss(batch: Batch) -> Tensor:
        made = trainer(loss_type=kind, **options)
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
        }
        if weights is not None:
            inputs["importance_sampling_ratio"] = weights
        value: Tensor = made._compute_loss(made.model, inputs)  # noqa: SLF001 (no public name computes it)
        return value

    return loss
