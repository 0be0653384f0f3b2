"""The terms of a loss. Needs torch."""

from __future__ import annotations

from ._pipeline.util.extras import extra

with extra("torch", "penstock.losses"):
    from ._stages.losses.adaptive_kl import AdaptiveKL
    from ._stages.losses.distillation import Distillation, SampledDistillation
    from ._stages.losses.entropy import Entropy
    from ._stages.losses.importance import ImportanceWeight
    from ._stages.losses.kl import KL
    from ._stages.losses.metrics import EffectiveSamples, Extreme, Mean, Metric, TokensUsed
    from ._stages.losses.policy import CISPO, DPPO, GSPO, SAPO, AdvantageWeighted, PPOClip
    from ._stages.losses.scored import Scored
    from ._stages.losses.sequence_masks import GeometricMask, OffPolicyMask, SequenceMask, WorstTokenMask
    from ._stages.losses.terms import Aggregated, Loss, LossValue, PerToken, Term

__all__ = [
    "CISPO",
    "DPPO",
    "GSPO",
    "KL",
    "SAPO",
    "AdaptiveKL",
    "AdvantageWeighted",
    "Aggregated",
    "Distillation",
    "EffectiveSamples",
    "Entropy",
    "Extreme",
    "GeometricMask",
    "ImportanceWeight",
    "Loss",
    "LossValue",
    "Mean",
    "Metric",
    "OffPolicyMask",
    "PPOClip",
    "PerToken",
    "SampledDistillation",
    "Scored",
    "SequenceMask",
    "Term",
    "TokensUsed",
    "WorstTokenMask",
]
