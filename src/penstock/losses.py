"""The terms of a loss. Needs torch."""

from __future__ import annotations

from ._pipeline.util.extras import extra

with extra("torch", "penstock.losses"):
    from ._stages.losses import (
        CISPO,
        GSPO,
        KL,
        AdvantageWeighted,
        Distillation,
        Entropy,
        ImportanceWeight,
        Loss,
        Mean,
        PerToken,
        PPOClip,
        SampledDistillation,
        Scored,
        Term,
    )

__all__ = [
    "CISPO",
    "GSPO",
    "KL",
    "AdvantageWeighted",
    "Distillation",
    "Entropy",
    "ImportanceWeight",
    "Loss",
    "Mean",
    "PPOClip",
    "PerToken",
    "SampledDistillation",
    "Scored",
    "Term",
]
