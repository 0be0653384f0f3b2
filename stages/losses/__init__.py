"""What a trainer minimises: terms that say what each token costs, and how they become one number."""

from .diagnostics import diagnostics
from .entropy import Entropy
from .importance import Beyond, ImportanceWeight, Level, Weighted
from .kl import KL, kl_estimate
from .metrics import EffectiveSamples, Highest, Lowest, Mean, Metric, merge, weights_metrics
from .policy import CISPO, GSPO, AdvantageWeighted, PolicyTerm, PPOClip
from .scored import OldPolicy, Scored, entropy_of
from .terms import Aggregated, Aggregation, Loss, LossValue, PerToken, Sum, Summand, Term

__all__ = [
    "CISPO",
    "GSPO",
    "KL",
    "AdvantageWeighted",
    "Aggregated",
    "Aggregation",
    "Beyond",
    "EffectiveSamples",
    "Entropy",
    "Highest",
    "ImportanceWeight",
    "Level",
    "Loss",
    "LossValue",
    "Lowest",
    "Mean",
    "Metric",
    "OldPolicy",
    "PPOClip",
    "PerToken",
    "PolicyTerm",
    "Scored",
    "Sum",
    "Summand",
    "Term",
    "Weighted",
    "diagnostics",
    "entropy_of",
    "kl_estimate",
    "merge",
    "weights_metrics",
]
