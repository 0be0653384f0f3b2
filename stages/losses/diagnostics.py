"""What a trainer reports of every micro-batch, whatever it minimises."""

from __future__ import annotations

import torch

from ..kl_estimate import kl_estimate
from .metrics import Mean, Metric, weights_metrics
from .scored import Scored, entropy_of

__all__ = ["diagnostics"]

ROWS_AT_ONCE = 1024
"""Tokens whose entropy is taken at once: it needs the memory of their distributions several times over."""


@torch.no_grad()
def diagnostics(scored: Scored) -> dict[str, Metric]:
    """`entropy`; `kl` (k3), `kl_k1` and `ratio/…` between the sampling policy and this one; `ref_kl` (k3)."""
    entropy = torch.cat([entropy_of(rows) for rows in torch.split(scored.predicted, ROWS_AT_ONCE)])
    said: dict[str, Metric] = {"entropy": Mean(scored.token_mean(entropy))}
    if scored.behavior_logprobs is not None:
        log_ratio = scored.log_ratio("behavior")
        said["kl"] = Mean(scored.token_mean(kl_estimate(-log_ratio, "k3", torch.exp)))
        said["kl_k1"] = Mean(scored.token_mean(-log_ratio))
        said |= weights_metrics("ratio", scored.ratio("behavior"), scored)
    if scored.ref_logprobs is not None:
        apart = scored.logprobs - scored.ref_logprobs
        said["ref_kl"] = Mean(scored.token_mean(kl_estimate(apart, "k3", torch.exp)))
    return said
