"""A training step of `TorchTrainer` as a user makes it: its rate, its share of the device's peak, and its kernels.

Floating-point operations are those of the model, as in PaLM (Chowdhery et al., 2022, arXiv:2204.02311, appendix B): two
for each weight of a matrix and each token that it is multiplied with, as many again for the gradient of its input, and
for its own gradient if it trains. Causal attention over n tokens multiplies n² / 2 pairs of a query and a key twice in
the forward pass and four times in the backward pass. Different from there: the head counts only where a token trains,
and half of the pairs are left out, which no kernel for packed rows computes. Work that is done again counts once.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock import TrainBatch
from penstock.losses import PPOClip
from penstock.models import HFModel
from penstock.torch import TorchTrainer, adamw

from .cases import Case, Load
from .devices import Device, Kernel

__all__ = ["GROUPS", "flops", "grouped", "measure_step"]

GROUPS = {
    "head": ("ByTiles", "_ByChunks", "_Linear"),
    "attention": ("scaled_dot_product", "ScaledDotProduct", "varlen_attn", "flash_attention", "efficient_attention"),
    "optimizer": ("Optimizer.",),
}
"""Parts of the names of ranges by which a kernel belongs to a group: functions of penstock's head, which torch records
by their class, torch's operators of attention, and its range around an optimizer. Every other kernel is in `rest`."""

LONGEST = 8
"""Number of kernels that are reported by name."""


def measure_step(case: Case, load: Load, device: Device) -> dict[str, Any]:
    """Return the costs of a step: tokens a second, shares, seconds by part, and kernels by group."""
    batch = load.batch(case)
    with case.model(device) as model:
        trainer = TorchTrainer(
            model, optimizer=partial(adamw, lr=1e-5), loss=PPOClip(), autocast=torch.bfloat16, micro_batch_tokens="auto"
        )
        trainer.step(batch)  # makes the moments, and chooses the size of micro-batches
        took: list[dict[str, float]] = []
        seconds = [device.seconds(lambda: took.append(trainer.step(batch))) for _ in range(load.repeats)]
        peak_gb = device.peak_gb()
        kernels = device.kernels(lambda: trainer.step(batch))
        needed = flops(model, batch)
    middle = statistics.median(seconds)
    parts = [name for name in took[0] if name.startswith("timing_s/")]
    return {
        "tokens": batch.tokens.size,
        "step_s": seconds,
        "tokens_per_s": batch.tokens.size / middle,
        "flops": needed,
        "share": None if device.sheet is None else needed / middle / device.sheet.bfloat16_flops,
        "peak_gb": peak_gb,
        **{name: statistics.median(each[name] for each in took) for name in parts},
        "kernels": grouped(kernels),
        "longest": longest(kernels),
    }


def flops(model: HFModel, batch: TrainBatch) -> float:
    """Return the floating-point operations of the model in a step on `batch`; see the module."""
    config, head = model.module.config, model.module.get_output_embeddings()
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers: int = config.num_hidden_layers
    heads: int = config.num_attention_heads
    total = 0.0
    for each in model.modules():
        if isinstance(each, nn.Linear):
            tokens = batch.loss_tokens if each is head else batch.tokens.size
            total += tokens * each.weight.numel() * (6 if each.weight.requires_grad else 4)
    pairs = float(np.square(batch.lengths(), dtype=np.float64).sum()) / 2
    return total + 12 * layers * heads * width * pairs


def grouped(kernels: list[Kernel]) -> dict[str, dict[str, float]]:
    """Return the number and the milliseconds of kernels of each group."""
    found: dict[str, dict[str, float]] = {name: {"count": 0, "ms": 0.0} for name in (*GROUPS, "rest")}
    for kernel in kernels:
        group = found[group_of(kernel)]
        group["count"] += 1
        group["ms"] += kernel.milliseconds
    return found


def group_of(kernel: Kernel) -> str:
    """Return the group of a kernel."""
    ranges = " ".join(kernel.ranges)
    return next((name for name, parts in GROUPS.items() if any(part in ranges for part in parts)), "rest")


def longest(kernels: list[Kernel]) -> list[dict[str, Any]]:
    """Return the kernels that took most of the time: name, group, count and milliseconds."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        sums[group_of(kernel), kernel.name].append(kernel.milliseconds)
    first = sorted(sums.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return [{"name": name, "group": group, "count": len(ms), "ms": sum(ms)} for (group, name), ms in first]
