"""Metrics that a trainer reports of every micro-batch, with any loss."""

from __future__ import annotations

import torch

from ..contracts.kl_estimate import kl_estimate
from .metrics import Mean, Metric, weights_metrics
from .scored import Scored


@torch.no_grad()
def diagnostics(scored: Scored) -> dict[str, Metric]:
    """Return `entropy`; `kl` (k3), `kl_k1` and `ratio/…` between the sampling policy and this one; `ref_kl` (k3)."""
    metrics: dict[str, Metric] = {"entropy": Mean(scored.token_mean(scored.entropy))}
    if scored.behavior_logprobs is not None:
        log_ratio = scored.log_ratio("behavior")
        metrics["kl"] = Mean(scored.token_mean(kl_estimate(-log_ratio, "k3", torch.exp)))
        metrics["kl_k1"] = Mean(scored.token_mean(-log_ratio))
        metrics |= weights_metrics("ratio", scored.ratio("behavior"), scored)
    if scored.ref_logprobs is not None:
        ref_log_ratio = scored.logprobs - scored.ref_logprobs
        metrics["ref_kl"] = Mean(scored.token_mean(kl_estimate(ref_log_ratio, "k3", torch.exp)))
    return metrics
