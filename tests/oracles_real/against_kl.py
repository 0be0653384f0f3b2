"""Divergences from a reference beside the code of the peers: in the loss, in the reward, and with an adaptive weight.

`make test-oracles` runs this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracles_real import of_areal, of_openrlhf, of_skyrl, of_slime, of_trl, of_verl
from tests.oracles_real.batches import BATCHES, LONGEST, Batch, Peer, agree
from tests.oracles_real.release import Release
from tests.oracles_real.rows import NEAR, PPO, Row, cells
from torch import Tensor

from penstock import KLReward, TrajectoryGroup
from penstock.losses import KL, AdaptiveKL
from penstock.testing import drive

Estimates = Callable[[Batch], Tensor]
"""[T] or [B, L] of a batch."""


def mean(estimates: Estimates) -> Peer:
    """Return the mean over the tokens that train."""

    def loss(batch: Batch) -> Tensor:
        values = estimates(batch)
        return (values[batch.mask] if values.dim() == 2 else values).mean()

    return loss


def verl(kind: str) -> Peer:
    """Return verl's `kl_penalty`."""
    return mean(lambda batch: of_verl.VERL.get(of_verl.CORE, "kl_penalty")(batch.new, batch.reference, kind))


def skyrl(kind: str) -> Peer:
    """Return SkyRL's `compute_approx_kl`."""
    return mean(
        lambda batch: of_skyrl.SKYRL.get(of_skyrl.PPO, "compute_approx_kl")(
            batch.new, batch.reference, batch.floats, kind
        )
    )


def openrlhf(kind: str, **options: Any) -> Peer:
    """Return OpenRLHF's `compute_approx_kl`, which is of float32."""
    function = "compute_approx_kl"
    return mean(
        lambda batch: of_openrlhf.OPENRLHF.get("openrlhf.models.utils", function)(
            batch.new, batch.reference, kl_estimator=kind, **options
        )
    )


def areal(kind: str) -> Peer:
    """Return AReaL's `KLEstimator`."""
    return mean(
        lambda batch: of_areal.AREAL.get("areal.utils.data", "KLEstimator")(kind, False)(batch.new, batch.reference)
    )


def trl(*, unbiased: bool) -> Peer:
    """Return TRL's loss with `beta`, and the loss without."""
    return of_trl.loss_of("dapo", epsilon_high=0.3, beta=0.3, use_bias_correction_kl=unbiased)


FLOAT32 = 2e-4
"""The tolerance for estimates of float32: k3 of a small log-ratio is a difference of nearly equal numbers."""

WITHIN = ("apart", "one advantage", "no advantage")
"""Batches whose estimates are within ±10, and large enough for float32."""

TABLE: dict[str, list[Row]] = {
    str(of_verl.VERL): [
        Row("kl_penalty k1", KL("k1"), verl("k1")),
        Row("kl_penalty k2", KL("k2"), verl("k2")),
        Row("kl_penalty k3", KL("k3"), verl("low_var_kl"), NEAR),
        Row("kl_penalty k1+", KL("k1+"), verl("k1+")),
        Row("kl_penalty k3+", KL("k3+"), verl("low_var_kl+"), NEAR),
    ],
    str(of_skyrl.SKYRL): [
        Row("compute_approx_kl k1", KL("k1"), skyrl("k1")),
        Row("compute_approx_kl k2", KL("k2"), skyrl("k2")),
        Row("compute_approx_kl k3", KL("k3"), skyrl("k3"), NEAR),
    ],
    str(of_trl.TRL): [
        Row("beta", PPO + 0.3 * KL("k3"), trl(unbiased=False), NEAR),
        Row("use_bias_correction_kl", PPO + 0.3 * KL("k3", unbiased="proximal"), trl(unbiased=True), NEAR),
    ],
    str(of_openrlhf.OPENRLHF): [
        Row("compute_approx_kl k1", KL("k1"), openrlhf("k1"), WITHIN, tolerance=FLOAT32),
        Row("compute_approx_kl k2", KL("k2"), openrlhf("k2"), WITHIN, tolerance=FLOAT32),
        Row("compute_approx_kl k3", KL("k3"), openrlhf("k3"), WITHIN, tolerance=FLOAT32),
        Row("unbiased_gradient k1", KL("k1+"), openrlhf("k1", unbiased_gradient=True), WITHIN, tolerance=FLOAT32),
        Row("unbiased_gradient k3", KL("k3+"), openrlhf("k3", unbiased_gradient=True), WITHIN, tolerance=FLOAT32),
    ],
    str(of_areal.AREAL): [
        Row("KLEstimator k1", KL("k1"), areal("k1"), WITHIN, tolerance=FLOAT32),
        Row("KLEstimator k2", KL("k2"), areal("k2"), WITHIN, tolerance=FLOAT32),
        Row("KLEstimator k3", KL("k3"), areal("k3"), WITHIN, tolerance=FLOAT32),
    ],
    "slime": [
        Row("compute_approx_kl k1", KL("k1"), mean(of_slime.approx_kl("k1")), WITHIN, tolerance=FLOAT32),
        Row("compute_approx_kl k2", KL("k2"), mean(of_slime.approx_kl("k2")), WITHIN, tolerance=FLOAT32),
        Row("compute_approx_kl k3", KL("k3"), mean(of_slime.approx_kl("k3")), WITHIN, tolerance=FLOAT32),
        Row(
            "compute_approx_kl k3 with a ratio",
            KL("k3", unbiased="proximal"),
            mean(of_slime.approx_kl("k3", with_ratio=True)),
            WITHIN,
            tolerance=FLOAT32,
        ),
    ],
}


@pytest.mark.parametrize(("row", "batch"), cells(TABLE))
def test_a_divergence_has_the_value_and_the_gradient_of_the_peer(row: Row, batch: str) -> None:
    agree(row.ours, row.peer, BATCHES[batch], tolerance=row.tolerance)


# -- in the reward -----------------------------------------------------------------------------------------------------


def group_of(batch: Batch) -> TrajectoryGroup:
    """Return the sequences of a batch behind a prompt of one token, each with reward 1."""
    return TrajectoryGroup.build(
        env="test",
        instance_id="0",
        sequences=[[1] * (1 + LONGEST)] * batch.sequences,
        loss_mask=[[False, *row] for row in batch.mask.tolist()],
        rewards=[1.0] * batch.sequences,
        behavior_logprobs=[[0.0, *row] for row in batch.old.tolist()],
        ref_logprobs=[[0.0, *row] for row in batch.reference.tolist()],
    )


async def penalties(batch: Batch, estimator: Any, *, by_token: bool) -> Tensor:
    """Return what KLReward adds: [B, L], or [B] the sums."""
    level: Any = "token" if by_token else "sequence"
    (out,) = await drive(KLReward(0.3, estimator, level), [group_of(batch)])
    if not by_token:
        return torch.tensor(out.rewards - 1.0, dtype=torch.float64)
    assert out.token_rewards is not None
    return torch.tensor(np.array(out.token_rewards), dtype=torch.float64).view(batch.sequences, -1)[:, 1:]


def verl_reward(batch: Batch, kind: str) -> Tensor:
    """Return the change of the rewards by the divergence that verl's `kl_penalty` estimates."""
    estimates: Tensor = of_verl.VERL.get(of_verl.CORE, "kl_penalty")(batch.old, batch.reference, kind)
    return -0.3 * estimates * batch.floats


def verl_compute_rewards(batch: Batch, kind: str) -> Tensor:  # noqa: ARG001 (it has one)
    """Return the change of the rewards by verl's `compute_rewards`."""
    zeros = torch.zeros_like(batch.old)
    changed: Tensor = of_verl.VERL.get(of_verl.CORE, "compute_rewards")(zeros, batch.old, batch.reference, 0.3)
    return changed * batch.floats


def openrlhf_reward(batch: Batch, kind: str) -> Tensor:
    """Return the change of the rewards by OpenRLHF's `compute_reward`."""
    utils = "openrlhf.models.utils"
    estimate, reward = (of_openrlhf.OPENRLHF.get(utils, name) for name in ("compute_approx_kl", "compute_reward"))
    estimates = estimate(batch.old, batch.reference, kl_estimator=kind)
    changed: Tensor = reward(torch.zeros(batch.sequences), 0.3, estimates, batch.floats)
    return changed.double() * batch.floats


REWARDS = [
    pytest.param(release, function, kind, id=f"{release}: {function.__name__} {kind}")
    for release, function, kinds in (
        (of_verl.VERL, verl_reward, ("k1", "k2", "k3")),
        (of_verl.VERL, verl_compute_rewards, ("k1",)),
        (of_openrlhf.OPENRLHF, openrlhf_reward, ("k1", "k2", "k3")),
    )
    for kind in kinds
]


@pytest.mark.parametrize("batch", WITHIN)
@pytest.mark.parametrize(("release", "peer", "kind"), REWARDS)
async def test_a_divergence_in_the_reward_is_that_of_the_peer(
    release: Release,  # noqa: ARG001 (its name)
    peer: Callable[[Batch, str], Tensor],
    kind: str,
    batch: str,
) -> None:
    given = BATCHES[batch]
    expected = peer(given, kind)

    torch.testing.assert_close(await penalties(given, kind, by_token=True), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(await penalties(given, kind, by_token=False), expected.sum(1), rtol=1e-5, atol=1e-6)


# -- the adaptive weight -----------------------------------------------------------------------------------------------

CONTROLLERS = [
    (of_verl.VERL, of_verl.CORE),
    (of_skyrl.SKYRL, of_skyrl.PPO),
    (of_openrlhf.OPENRLHF, "openrlhf.trainer.ppo_utils.kl_controller"),
]


@pytest.mark.parametrize(("release", "module"), CONTROLLERS, ids=[str(release) for release, _ in CONTROLLERS])
def test_an_adaptive_weight_follows_that_of_the_peer(release: Release, module: str) -> None:
    theirs = release.get(module, "AdaptiveKLController")(0.1, 0.05, 500)
    ours = AdaptiveKL(0.1, 0.05, horizon=500)

    for divergence, sequences in ((0.01, 64), (0.05, 64), (0.052, 32), (3.0, 128), (0.0, 7)):
        theirs.update(divergence, sequences)
        ours.adapt({"adaptive_kl/kl": divergence}, sequences)

        assert ours.weight == pytest.approx(theirs.value, rel=1e-12)
