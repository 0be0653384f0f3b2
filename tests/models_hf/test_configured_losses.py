"""The losses that a configuration names."""

from __future__ import annotations

from typing import Any

import pytest
from tests.run_parts import configured_loss

from penstock.errors import InvalidConfig
from penstock.losses import DPPO, GMPO, SAPO, VESPO, ClipCov, KLCov, Loss, PPOClip


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        ({"loss": "dppo"}, DPPO().aggregated("token-mean")),
        ({"loss": "dppo", "clip": (0.1, 0.3)}, DPPO(low=0.1, high=0.3).aggregated("token-mean")),
        (
            {"loss": "sapo", "aggregation": "seq-mean-token-mean"},
            SAPO().aggregated("seq-mean-token-mean"),
        ),
        ({"loss": "gmpo", "clip": (0.3, 0.5)}, GMPO(0.3, 0.5).aggregated("token-mean")),
        ({"loss": "vespo"}, VESPO().aggregated("token-mean")),
        ({"loss": "clip_cov", "clip": (0.1, 0.3)}, ClipCov(0.1, 0.3).aggregated("token-mean")),
        ({"loss": "kl_cov"}, KLCov().aggregated("token-mean")),
    ],
    ids=["dppo", "bounded dppo", "sapo", "gmpo", "vespo", "clip_cov", "kl_cov"],
)
def test_a_loss_is_configured_by_name(values: dict[str, Any], loss: Loss) -> None:
    assert configured_loss(**values) == loss


def test_a_loss_without_bounds_takes_none() -> None:
    with pytest.raises(
        InvalidConfig, match="clip: expected with loss ppo, gspo, gmpo, cispo, dppo, clip_cov, got loss sapo"
    ):
        configured_loss(loss="sapo", clip=(0.1, 0.2))


def test_an_adaptive_weight_begins_as_configured() -> None:
    loss = configured_loss(kl=0.01, adaptive_kl={"target": 0.05})

    assert repr(loss) == (
        f"({PPOClip()!r} + AdaptiveKL(weight=0.01, target=0.05, horizon=10000, estimator='k3'))"
        ".aggregated('token-mean')"
    )


def test_an_adaptive_weight_needs_one_to_begin_with() -> None:
    with pytest.raises(InvalidConfig, match="adaptive_kl: expected a positive kl beside it"):
        configured_loss(adaptive_kl={"target": 0.05})
