"""The terms of a loss. Needs torch."""

from __future__ import annotations

from ._pipeline.util.extras import extra

with extra("torch", "penstock.losses"):
    from ._stages.losses.adaptive_kl import AdaptiveKL
    from ._stages.losses.choices import TokenChoice
    from ._stages.losses.covariance import ClipCov, KLCov
    from ._stages.losses.distillation import Distillation, SampledDistillation
    from ._stages.losses.entropy import AdaptiveEntropy, Entropy
    from ._stages.losses.importance import ImportanceWeight
    from ._stages.losses.kl import KL
    from ._stages.losses.masks import GeometricMask, Mask, OffPolicyMask, ProductMask, TokenMask, WorstTokenMask
    from ._stages.losses.metrics import EffectiveSamples, Extreme, Mean, Metric, TokensUsed
    from ._stages.losses.policy import CISPO, DPPO, SAPO, AdvantageWeighted, PPOClip
    from ._stages.losses.scored import Scored
    from ._stages.losses.sequence_policy import GMPO, GSPO, VESPO
    from ._stages.losses.terms import Aggregated, Loss, LossValue, PerToken, Term
    from ._stages.losses.top_entropy import TopEntropyMask

__all__ = [
    "CISPO",
    "DPPO",
    "GMPO",
    "GSPO",
    "KL",
    "SAPO",
    "VESPO",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "AdvantageWeighted",
    "Aggregated",
    "ClipCov",
    "Distillation",
    "EffectiveSamples",
    "Entropy",
    "Extreme",
    "GeometricMask",
    "ImportanceWeight",
    "KLCov",
    "Loss",
    "LossValue",
    "Mask",
    "Mean",
    "Metric",
    "OffPolicyMask",
    "PPOClip",
    "PerToken",
    "ProductMask",
    "SampledDistillation",
    "Scored",
    "Term",
    "TokenChoice",
    "TokenMask",
    "TokensUsed",
    "TopEntropyMask",
    "WorstTokenMask",
]
