"""Policy losses beside the code of the peers: values, and gradients by log π. `make test-oracles` runs this file.

Rows are compared on all batches, or on those that they name: `against_differences` shows what differs on the others.
"""

from __future__ import annotations

import math

import pytest
from tests.oracles_real import of_areal, of_openrlhf, of_prime_rl, of_skyrl, of_slime, of_trl, of_verl
from tests.oracles_real.batches import BATCHES, LONGEST, agree, chosen
from tests.oracles_real.rows import BY_SEQUENCE, NEAR, OF_SKYRL, OF_TRL, OF_VERL, PPO, Row, cells

from penstock.losses import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    AdvantageWeighted,
    ClipCov,
    ImportanceWeight,
    KLCov,
    PPOClip,
)

VERL: list[Row] = [
    Row("vanilla", PPO, of_verl.policy_loss("vanilla", **OF_VERL)),
    Row(
        "vanilla dual clip",
        PPOClip(0.2, 0.3, dual_clip=3.0, old="proximal"),
        of_verl.policy_loss("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0),
    ),
    Row(
        "vanilla seq-mean-token-sum",
        PPO.aggregated("seq-mean-token-sum"),
        of_verl.policy_loss("vanilla", "seq-mean-token-sum", **OF_VERL),
    ),
    Row(
        "vanilla seq-mean-token-mean",
        PPO.aggregated("seq-mean-token-mean"),
        of_verl.policy_loss("vanilla", "seq-mean-token-mean", **OF_VERL),
    ),
    Row(
        "vanilla seq-mean-token-sum-norm",
        PPO.aggregated("seq-mean-token-sum-norm", longest=LONGEST),
        of_verl.policy_loss("vanilla", "seq-mean-token-sum-norm", **OF_VERL),
    ),
    Row(
        "vanilla loss_scale_factor",
        PPO.aggregated("seq-mean-token-sum-norm", longest=31),
        of_verl.policy_loss("vanilla", "seq-mean-token-sum-norm", scale=31, **OF_VERL),
    ),
    Row(
        "dppo_tv",
        DPPO("tv", low=0.05, high=0.1),
        of_verl.policy_loss("dppo_tv", old="rollout", clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=20.0),
    ),
    Row(
        "dppo_kl",
        DPPO("kl", low=0.01, high=0.02, highest=1.5),
        of_verl.policy_loss("dppo_kl", old="rollout", clip_ratio_low=0.01, clip_ratio_high=0.02, clip_ratio_c=1.5),
    ),
    Row("gspo", GSPO(0.2, 0.3), of_verl.policy_loss("gspo", **OF_VERL), NEAR),
    Row(
        "gspo seq-mean-token-mean",
        GSPO(0.02, 0.03).aggregated("seq-mean-token-mean"),
        of_verl.policy_loss("gspo", "seq-mean-token-mean", clip_ratio_low=0.02, clip_ratio_high=0.03),
        NEAR,
    ),
    Row(
        "sapo",
        SAPO(1.0, 1.5, old="proximal").aggregated("seq-mean-token-mean"),
        of_verl.policy_loss("sapo", tau_pos=1.0, tau_neg=1.5),
    ),
    Row("gpg", AdvantageWeighted(), of_verl.policy_loss("gpg")),
    Row(
        "cispo",
        CISPO(0.8, 1.3, old="proximal"),
        of_verl.policy_loss("cispo", clip_ratio_low=0.2, clip_ratio_high=0.3),
    ),
    Row(
        "geo_mean",
        GMPO(0.3, 0.4, old="proximal").aggregated("seq-mean-token-mean", counted="all"),
        of_verl.policy_loss("geo_mean", clip_ratio_low=0.3, clip_ratio_high=0.4),
        BY_SEQUENCE,
    ),
    Row(
        "clip_cov",
        ClipCov(0.2, 0.3, share=1.0, least=0.1, most=0.9, old="proximal"),
        of_verl.policy_loss("clip_cov", **OF_VERL, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.9),
    ),
    Row(
        "kl_cov",
        KLCov(share=0.3, weight=0.7, old="proximal"),
        of_verl.policy_loss("kl_cov", kl_cov_ratio=0.3, ppo_kl_coef=0.7),
        ("near", "apart", "far", "one advantage"),
    ),
]

SKYRL: list[Row] = [
    Row("ppo_policy_loss", PPO, of_skyrl.policy_loss("ppo_policy_loss", **OF_SKYRL)),
    Row(
        "ppo_policy_loss dual clip",
        PPOClip(0.2, 0.3, dual_clip=3.0, old="proximal"),
        of_skyrl.policy_loss("ppo_policy_loss", **OF_SKYRL | {"policy_loss_type": "dual_clip", "clip_ratio_c": 3.0}),
    ),
    Row(
        "ppo_policy_loss sequence_mean",
        PPO.aggregated("seq-mean-token-mean", counted="all"),
        of_skyrl.policy_loss("ppo_policy_loss", "sequence_mean", **OF_SKYRL),
    ),
    Row(
        "ppo_policy_loss seq_mean_token_sum_norm",
        PPO.aggregated("seq-mean-token-sum-norm", longest=of_skyrl.BOUND, counted="all"),
        of_skyrl.policy_loss("ppo_policy_loss", "seq_mean_token_sum_norm", **OF_SKYRL),
    ),
    Row(
        "ppo_policy_loss prompt_mean",
        PPO.aggregated("prompt-mean"),
        of_skyrl.policy_loss("ppo_policy_loss", "prompt_mean", **OF_SKYRL),
    ),
    Row(
        "sapo_policy_loss",
        SAPO(1.0, 1.5, old="proximal").aggregated("seq-mean-token-mean", counted="all"),
        of_skyrl.policy_loss("sapo_policy_loss", "sequence_mean", sapo={"tau_pos": 1.0, "tau_neg": 1.5}),
    ),
    Row(
        "gspo_policy_loss",
        GSPO(0.2, 0.3).aggregated("seq-mean-token-mean", counted="all"),
        of_skyrl.policy_loss("gspo_policy_loss", "sequence_mean", **OF_SKYRL),
        NEAR,
    ),
    Row(
        "compute_policy_loss_cispo",
        CISPO(0.8, 1.3, old="proximal"),
        of_skyrl.policy_loss(
            "compute_policy_loss_cispo",
            cispo={"cispo_anchor": "old", "cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.3},
        ),
    ),
    Row(
        "compute_policy_loss_cispo rollout",
        CISPO(0.8, 1.3),
        of_skyrl.policy_loss(
            "compute_policy_loss_cispo",
            cispo={"cispo_anchor": "rollout", "cispo_eps_clip_low": 0.2, "cispo_eps_clip_high": 0.3},
        ),
    ),
    Row(
        "rollout_is_policy_loss",
        AdvantageWeighted() * ImportanceWeight(high=1.3, low=0.8, beyond="mask"),
        of_skyrl.policy_loss("rollout_is_policy_loss", **OF_SKYRL),
    ),
    Row(
        "dppo_policy_loss binary_tv",
        DPPO("tv", low=0.05, high=0.1, highest=math.inf),
        of_skyrl.policy_loss("dppo_policy_loss", dppo={"dppo_type": "binary_tv", "delta_low": 0.05, "delta_high": 0.1}),
        NEAR,
        gradient_only=True,
    ),
    Row(
        "dppo_policy_loss binary_kl",
        DPPO("kl", low=0.01, high=0.02, highest=math.inf),
        of_skyrl.policy_loss(
            "dppo_policy_loss", dppo={"dppo_type": "binary_kl", "delta_low": 0.01, "delta_high": 0.02}
        ),
        NEAR,
        gradient_only=True,
    ),
    Row(
        "compute_policy_loss_clip_cov",
        ClipCov(0.2, 0.3, share=1.0, least=0.1, most=0.9, old="proximal"),
        of_skyrl.policy_loss(
            "compute_policy_loss_clip_cov",
            None,
            **OF_SKYRL,
            clip_cov={"clip_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.9},
        ),
    ),
    Row(
        "compute_policy_loss_kl_cov",
        KLCov(share=0.3, weight=0.7, old="proximal"),
        of_skyrl.policy_loss("compute_policy_loss_kl_cov", None, kl_cov={"kl_cov_frac": 0.3, "ppo_kl_coef": 0.7}),
        ("near", "apart", "far", "one advantage"),
    ),
]

TRL: list[Row] = [
    Row("grpo", PPO.aggregated("seq-mean-token-mean", counted="all"), of_trl.loss_of("grpo", **OF_TRL)),
    Row("bnpo", PPO, of_trl.loss_of("bnpo", **OF_TRL)),
    Row("dapo", PPO, of_trl.loss_of("dapo", **OF_TRL)),
    Row(
        "dr_grpo",
        PPO.aggregated("seq-mean-token-sum-norm", longest=20, counted="all"),
        of_trl.loss_of("dr_grpo", **OF_TRL),
    ),
    Row("luspo", PPO.aggregated("seq-mean-token-sum", counted="all"), of_trl.loss_of("luspo", **OF_TRL)),
    Row("dapo delta", PPOClip(0.2, 0.3, dual_clip=2.0, old="proximal"), of_trl.loss_of("dapo", **OF_TRL, delta=2.0)),
    Row(
        "grpo sequence",
        GSPO(0.02, 0.03).aggregated("seq-mean-token-mean", counted="all"),
        of_trl.loss_of("grpo", importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03),
        BY_SEQUENCE,
    ),
    Row("cispo", CISPO(0.0, 1.3, old="proximal"), of_trl.loss_of("cispo", epsilon_high=1.3)),
    Row(
        "sapo",
        SAPO(1.0, 1.5, old="proximal").aggregated("seq-mean-token-mean", counted="all"),
        of_trl.loss_of("sapo", sapo_temperature_neg=1.5),
    ),
    Row("vespo", VESPO(old="proximal"), of_trl.loss_of("vespo")),
]

OPENRLHF: list[Row] = [
    Row("PolicyLoss ppo", PPO, of_openrlhf.policy_loss()),
    Row(
        "PolicyLoss ppo of samples",
        PPO.aggregated("seq-mean-token-mean"),
        of_openrlhf.policy_loss(token_level_loss=False),
    ),
    Row(
        "PolicyLoss ppo dual clip",
        PPOClip(0.2, 0.3, dual_clip=3.0, old="proximal"),
        of_openrlhf.policy_loss(dual_clip=3.0),
    ),
    Row(
        "PolicyLoss gspo",
        GSPO(0.2, 0.3).aggregated("seq-mean-token-mean"),
        of_openrlhf.policy_loss(policy_loss_type="gspo"),
        BY_SEQUENCE,
    ),
]

AREAL: list[Row] = [
    Row("ppo_actor_loss_fn", PPO, of_areal.ppo()),
    Row("ppo_actor_loss_fn c_clip", PPOClip(0.2, 0.3, dual_clip=3.0, old="proximal"), of_areal.ppo(c_clip=3.0)),
    Row("ppo_actor_loss_fn sequence", GSPO(0.2, 0.3), of_areal.ppo(importance_sampling_level="sequence"), BY_SEQUENCE),
    Row("sapo_loss_fn", SAPO(1.0, 1.5, old="proximal"), of_areal.sapo(1.0, 1.5)),
]

SLIME: list[Row] = [
    Row("compute_policy_loss", PPO, of_slime.ppo()),
    Row(
        "compute_policy_loss eps_clip_c", PPOClip(0.2, 0.3, dual_clip=3.0, old="proximal"), of_slime.ppo(dual_clip=3.0)
    ),
    Row("compute_gspo_kl", GSPO(0.2, 0.3), of_slime.ppo("sequence"), BY_SEQUENCE),
    Row("compute_cispo_loss", CISPO(0.8, 1.3, old="proximal"), of_slime.cispo(0.2, 0.3)),
]

PRIME_RL: list[Row] = [
    Row(
        "default_loss_fn",
        DPPO("tv", low=0.05, high=0.1, highest=math.inf),
        of_prime_rl.default(0.05, 0.1),
        gradient_only=True,
    ),
]

TABLE: dict[str, list[Row]] = {
    str(of_verl.VERL): VERL,
    str(of_skyrl.SKYRL): SKYRL,
    str(of_trl.TRL): TRL,
    str(of_openrlhf.OPENRLHF): OPENRLHF,
    str(of_areal.AREAL): AREAL,
    "slime": SLIME,
    "prime-rl": PRIME_RL,
}


@pytest.mark.parametrize(("row", "batch"), cells(TABLE))
def test_a_policy_loss_has_the_value_and_the_gradient_of_the_peer(row: Row, batch: str) -> None:
    agree(row.ours, row.peer, BATCHES[batch], value=not row.gradient_only, prepare=chosen(row.ours))
