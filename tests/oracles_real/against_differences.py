"""Differences from the peers that are meant. `make test-oracles` runs this file.

A test here fails when a peer's newer release no longer differs: its row in a table can then have more batches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracles_real import of_areal, of_openrlhf, of_skyrl, of_slime, of_trl, of_verl
from tests.oracles_real.batches import BATCHES, Peer, agree, chosen, differentiated, ours, shifted
from tests.oracles_real.rows import OF_SKYRL, OF_VERL, PPO

from penstock import AdvantageNormalizer
from penstock.losses import DPPO, GSPO, KL, ClipCov, KLCov, PPOClip
from penstock.testing import drive, group

BOUNDED: dict[str, Peer] = {
    str(of_verl.VERL): of_verl.policy_loss("vanilla", **OF_VERL),
    str(of_skyrl.SKYRL): of_skyrl.policy_loss("ppo_policy_loss", **OF_SKYRL),
    str(of_openrlhf.OPENRLHF): of_openrlhf.policy_loss(),
}

UNBOUNDED: dict[str, Peer] = {
    str(of_trl.TRL): of_trl.loss_of("dapo", epsilon_high=0.3),
    str(of_areal.AREAL): of_areal.ppo(),
    "slime": of_slime.ppo(),
}


@pytest.mark.parametrize("log_ratio", [25.0, -25.0])
@pytest.mark.parametrize("release", BOUNDED)
def test_beyond_20_nats_a_ratio_has_the_bound_of_the_peer(release: str, log_ratio: float) -> None:
    agree(PPO, BOUNDED[release], shifted(log_ratio))


@pytest.mark.parametrize("release", UNBOUNDED)
def test_beyond_20_nats_a_ratio_is_bounded_where_that_of_the_peer_grows(release: str) -> None:
    found, theirs = ours(PPO, shifted(25.0)), differentiated(UNBOUNDED[release], shifted(25.0))

    assert theirs.value == pytest.approx(math.exp(25))
    assert theirs.gradient.sum() == pytest.approx(math.exp(25))
    assert found.value == pytest.approx(math.exp(20))
    assert not found.gradient.any()


GSPO_BOUNDED: dict[str, Peer] = {
    str(of_verl.VERL): of_verl.policy_loss("gspo", "seq-mean-token-mean", **OF_VERL),
    str(of_skyrl.SKYRL): of_skyrl.policy_loss("gspo_policy_loss", "sequence_mean", **OF_SKYRL),
}


@pytest.mark.parametrize("release", GSPO_BOUNDED)
def test_the_ratio_of_a_sequence_is_bounded_at_20_nats_and_at_10_by_the_peer(release: str) -> None:
    loss = GSPO(0.2, 0.3).aggregated("seq-mean-token-mean")
    found, theirs = ours(loss, shifted(12.0)), differentiated(GSPO_BOUNDED[release], shifted(12.0))

    assert theirs.value == pytest.approx(math.exp(10))
    assert not theirs.gradient.any()
    assert found.value == pytest.approx(math.exp(12))
    assert found.gradient.sum() == pytest.approx(math.exp(12))


GSPO_OF_SEQUENCES: dict[str, Peer] = {
    str(of_trl.TRL): of_trl.loss_of("grpo", importance_sampling_level="sequence", epsilon_low=0.9, epsilon_high=1e9),
    str(of_openrlhf.OPENRLHF): of_openrlhf.policy_loss(policy_loss_type="gspo", clip_eps_low=0.9, clip_eps_high=1e9),
    str(of_areal.AREAL): of_areal.ppo(importance_sampling_level="sequence", eps_clip=0.9, eps_clip_higher=1e9),
}


@pytest.mark.parametrize("release", GSPO_OF_SEQUENCES)
def test_gspo_keeps_the_advantage_of_each_token_where_the_peer_has_their_mean(release: str) -> None:
    given = shifted(0.1, advantages=(1.0, 2.0, 6.0))
    loss = GSPO(0.9, 1e9).aggregated("seq-mean-token-mean")

    found, theirs = ours(loss, given), differentiated(GSPO_OF_SEQUENCES[release], given)

    assert found.value == pytest.approx(float(theirs.value))
    assert theirs.gradient.tolist() == pytest.approx([float(found.gradient.mean())] * 3)
    assert (found.gradient / found.gradient[0]).tolist() == pytest.approx([1, 2, 6])


@pytest.mark.parametrize("library", ["verl", "skyrl"])
def test_k3_is_bounded_by_its_log_ratio_and_by_10_nats_by_the_peer(library: str) -> None:
    given = shifted(-15.0)
    verl, skyrl = of_verl.VERL.get(of_verl.CORE, "kl_penalty"), of_skyrl.SKYRL.get(of_skyrl.PPO, "compute_approx_kl")
    estimate = verl if library == "verl" else lambda new, reference, _: skyrl(new, reference)

    theirs = differentiated(lambda batch: estimate(batch.new, batch.reference, "k3").mean(), given)
    found = ours(KL("k3"), given)

    assert theirs.value == pytest.approx(10)
    assert not theirs.gradient.any()
    assert found.value == pytest.approx(math.exp(15) - 15 - 1)
    assert found.gradient.sum() == pytest.approx(1 - math.exp(15))


def test_dppo_without_a_bound_follows_ratios_beyond_the_20_nats_of_skyrl() -> None:
    given = shifted(25.0)
    peer = of_skyrl.policy_loss(
        "dppo_policy_loss", dppo={"dppo_type": "binary_tv", "delta_low": 0.9, "delta_high": 0.9}
    )

    found, theirs = ours(DPPO(low=0.9, high=0.9, highest=math.inf), given), differentiated(peer, given)

    assert not theirs.gradient.any()
    assert found.gradient.sum() == pytest.approx(math.exp(25))


def test_clip_cov_holds_back_as_many_tokens_as_verl_and_others_of_them() -> None:
    given = BATCHES["near"]
    given = replace(given, advantages=torch.where(given.advantages == 0, 1.0, 3 * given.advantages))
    options: dict[str, Any] = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 50.0}
    loss = ClipCov(0.2, 0.3, share=0.1, least=0.1, most=50.0, old="proximal")
    bare = ours(PPO, given).gradient != 0

    found = ours(loss, given, chosen(loss)).gradient
    theirs = differentiated(of_verl.policy_loss("clip_cov", **OF_VERL, **options), given).gradient

    assert int((bare & (found == 0)).sum()) == int((bare & (theirs == 0)).sum()) == int(0.1 * given.mask.sum())


@pytest.mark.parametrize("batch", ["near", "apart", "one advantage"])
def test_the_divergence_of_skyrls_kl_cov_is_a_sum_and_its_bounds_of_a_covariance_are_those_of_a_share(
    batch: str,
) -> None:
    """SkyRL divides the advantages, before the loss, by the tokens of the batch; the rest of the loss it does not."""
    given = BATCHES[batch]
    tokens = int(given.mask.sum())
    kl_cov = KLCov(share=0.3, weight=0.7 * tokens, old="proximal")
    clip_cov = ClipCov(0.2, 0.3, share=1.0, least=0.1, most=0.9, old="proximal")
    bounds = {"clip_ratio": 1.0, "clip_cov_lb": 0.1 / tokens, "clip_cov_ub": 0.9 / tokens}

    theirs = of_skyrl.policy_loss("compute_policy_loss_kl_cov", kl_cov={"kl_cov_frac": 0.3, "ppo_kl_coef": 0.7})
    agree(kl_cov, theirs, given, prepare=chosen(kl_cov))
    theirs = of_skyrl.policy_loss("compute_policy_loss_clip_cov", clip_cov=bounds, **OF_SKYRL)
    agree(clip_cov, theirs, given, prepare=chosen(clip_cov))


def test_a_dual_clip_leaves_a_value_that_the_clip_of_verl_bounds() -> None:
    """verl has always a dual clip, of 3 by default; here it is an option."""
    default: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    theirs = differentiated(of_verl.policy_loss("vanilla", **default), shifted(2.0))

    assert theirs.value == pytest.approx(3)
    assert ours(PPO, shifted(2.0)).value == pytest.approx(math.exp(2))
    agree(PPOClip(0.2, 0.3, dual_clip=3.0, old="proximal"), of_verl.policy_loss("vanilla", **default), shifted(2.0))


async def advantages_of(rewards: list[float]) -> list[float]:
    (out,) = await drive(AdvantageNormalizer("grpo"), [group(completion_lengths=[1] * len(rewards), rewards=rewards)])
    assert out.advantages is not None
    return [float(advantage) for advantage in out.advantages[out.loss_mask]]


def verl_grpo(rewards: list[float]) -> list[float]:
    of_tokens, ones = torch.tensor(rewards)[:, None], torch.ones(len(rewards), 1)
    index = np.zeros(len(rewards), np.int64)
    found, _ = of_verl.VERL.get(of_verl.CORE, "compute_grpo_outcome_advantage")(of_tokens, ones, index)
    values: list[float] = found[:, 0].tolist()
    return values


async def test_a_group_of_one_has_no_advantage_where_it_keeps_its_reward_in_verl() -> None:
    assert verl_grpo([0.75]) == pytest.approx([0.75 / (1 + 1e-6)])
    assert await advantages_of([0.75]) == [0.0]


async def test_equal_rewards_have_no_advantage_where_verl_divides_noise_by_noise() -> None:
    assert max(map(abs, verl_grpo([1 / 3] * 7))) == pytest.approx(0.0289, rel=0.01)
    assert await advantages_of([1 / 3] * 7) == [0.0] * 7


async def test_other_groups_have_the_advantages_of_verl() -> None:
    rewards = [0.0, 1.0, 0.25, 4.0]

    assert await advantages_of(rewards) == pytest.approx(verl_grpo(rewards), rel=1e-5)
