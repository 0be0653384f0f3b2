"""Estimators of a divergence from sampled tokens, for numpy (`KLReward`) and torch (the losses).

Schulman, "Approximating KL Divergence" (2020), with Δ = log p − log q of a token that p sampled:

    k1  Δ                 unbiased, of either sign, of high variance
    k2  Δ² / 2            biased, never negative
    k3  exp(−Δ) + Δ − 1   unbiased, never negative
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
"""An estimator of the list above."""

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated: far outside any trust region, and still finite. Means
and sums of them are clamped as a whole, because the tokens of one sequence may cancel."""

Ratios = TypeVar("Ratios", NDArray[np.float64], "Tensor")


def kl_estimate(log_ratio: Ratios, estimator: KLEstimator, exp: Callable[[Ratios], Ratios]) -> Ratios:
    """Return estimates of KL(p ‖ q), one for each of `log_ratio` = log p/q; `exp` is numpy's or torch's."""
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio**2 / 2
        case "k3":
            bounded = log_ratio.clip(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            k3: Ratios = exp(-bounded) + bounded - 1
            return k3
