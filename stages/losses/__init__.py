"""Losses of a trainer: terms with a value for each token, and their aggregation to one number."""

from .diagnostics import diagnostics
from .distillation import TOKENS_USED, Distillation, Divergence, Rest, SampledDistillation
from .entropy import Entropy
from .importance import Beyond, ImportanceWeight, Level, Weighted
from .kl import KL
from .metrics import EffectiveSamples, Max, Mean, Metric, Min, TokensUsed, check_used, merge, weights_metrics
from .policy import CISPO, GSPO, AdvantageWeighted, PolicyTerm, PPOClip
from .scored import OldPolicy, Scored, entropy_of
from .terms import Aggregated, Aggregation, Counted, Loss, LossTerm, LossValue, PerToken, Sum, Term

__all__ = [
    "CISPO",
    "GSPO",
    "KL",
    "TOKENS_USED",
    "AdvantageWeighted",
    "Aggregated",
    "Aggregation",
    "Beyond",
    "Counted",
    "Distillation",
    "Divergence",
    "EffectiveSamples",
    "Entropy",
    "ImportanceWeight",
    "Level",
    "Loss",
    "LossTerm",
    "LossValue",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "OldPolicy",
    "PPOClip",
    "PerToken",
    "PolicyTerm",
    "Rest",
    "SampledDistillation",
    "Scored",
    "Sum",
    "Term",
    "TokensUsed",
    "Weighted",
    "check_used",
    "diagnostics",
    "entropy_of",
    "merge",
    "weights_metrics",
]
