"""Importance weights and masks beside the code of the peers. `make test-oracles` runs this file."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.oracles_real import of_areal, of_openrlhf, of_skyrl, of_slime, of_trl, of_verl
from tests.oracles_real.batches import BATCHES, Peer, agree, ours
from tests.oracles_real.rows import NEAR, OF_SKYRL, OF_VERL, PPO, Row, cells

from penstock.losses import GeometricMask, ImportanceWeight, OffPolicyMask, ProductMask, TokenMask, WorstTokenMask

TRUNCATED = PPO * ImportanceWeight(high=1.4)
ICEPOP = PPO * ImportanceWeight(high=1.4, low=0.7, beyond="mask")
WORST = math.sqrt(2 * 0.15)


def skyrl(**correction: Any) -> Peer:
    """Return SkyRL's PPO with a correction."""
    return of_skyrl.policy_loss("ppo_policy_loss", correction=correction, **OF_SKYRL)


def areal(**rejection: Any) -> Peer:
    """Return AReaL's PPO with a correction by the ratio."""
    return of_areal.ppo(rejection={"metric": "ratio", "upper": 1.4, "lower": 0.7} | rejection)


def openrlhf(level: str, mode: str) -> Peer:
    """Return OpenRLHF's PPO with a correction by the ratio."""
    return of_openrlhf.policy_loss(
        is_correction_level=level, is_correction_mode=mode, is_correction_threshold=(0.7, 1.4)
    )


FLOAT32 = 1e-5
"""The tolerance for AReaL, whose ratios are of float32."""

TABLE: dict[str, list[Row]] = {
    str(of_verl.VERL): [
        Row("weights token", TRUNCATED, of_verl.weighted("token", 1.4, **OF_VERL)),
        Row("weights token lower_upper", ICEPOP, of_verl.weighted("token", "0.7_1.4", **OF_VERL)),
        Row(
            "weights sequence",
            PPO * ImportanceWeight(high=1.4, level="sequence"),
            of_verl.weighted("sequence", 1.4, **OF_VERL),
        ),
        Row(
            "weights sequence lower_upper",
            PPO * ImportanceWeight(high=1.4, low=0.7, level="sequence", beyond="mask"),
            of_verl.weighted("sequence", "0.7_1.4", **OF_VERL),
            NEAR,  # it raises ZeroDivisionError where every weight is 0
        ),
        Row("mask token_k1", PPO * TokenMask(1 / 1.4, 1 / 0.7), of_verl.rejecting("token_k1", "0.7_1.4", **OF_VERL)),
        Row(
            "mask seq_mean_k1",
            PPO * GeometricMask(1 / 1.2, 1 / 0.9),
            of_verl.rejecting("seq_mean_k1", "0.9_1.2", **OF_VERL),
        ),
        Row(
            "mask seq_sum_k1",
            PPO * ProductMask(1 / 1.4, 1 / 0.7),
            of_verl.rejecting("seq_sum_k1", "0.7_1.4", **OF_VERL),
        ),
        Row(
            "mask seq_max_k2",
            PPO * WorstTokenMask(math.exp(-WORST), math.exp(WORST)),
            of_verl.rejecting("seq_max_k2", "0.15", **OF_VERL),
        ),
        Row(
            "mask token_k1 and seq_mean_k1",
            PPO * TokenMask(1 / 1.4, 1 / 0.7) * GeometricMask(1 / 1.2, 1 / 0.9),
            of_verl.rejecting("token_k1,seq_mean_k1", "0.7_1.4,0.9_1.2", **OF_VERL),
        ),
    ],
    str(of_skyrl.SKYRL): [
        Row("compute_tis_ratio token", TRUNCATED, skyrl(tis_ratio_type="token", token_tis_ratio_clip_high=1.4)),
        Row(
            "compute_tis_ratio sequence",
            PPO * ImportanceWeight(high=1.4, level="sequence"),
            skyrl(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.4),
        ),
        Row(
            "compute_token_mask",
            PPO * TokenMask(0.7, 1.4),
            skyrl(token_mask_is_threshold_low=0.7, token_mask_is_threshold_high=1.4),
        ),
        Row(
            "compute_token_mask with compute_tis_ratio",
            ICEPOP,
            skyrl(
                tis_ratio_type="token",
                token_tis_ratio_clip_high=1.4,
                token_mask_is_threshold_low=0.7,
                token_mask_is_threshold_high=1.4,
            ),
        ),
        Row(
            "compute_sequence_mask geometric",
            PPO * GeometricMask(0.9, 1.2),
            skyrl(sequence_mask_metric="geometric", geo_mask_low=0.9, geo_mask_high=1.2),
        ),
        Row(
            "compute_sequence_mask product",
            PPO * ProductMask(0.7, 1.4),
            skyrl(sequence_mask_metric="product", product_mask_low=0.7, product_mask_high=1.4),
        ),
        Row(
            "compute_outlier_token_mask",
            PPO * WorstTokenMask(0.6, 1.7),
            skyrl(outlier_token_is_threshold_low=0.6, outlier_token_is_threshold_high=1.7),
        ),
    ],
    str(of_trl.TRL): [
        Row("token_truncate", TRUNCATED, of_trl.corrected("token_truncate", None, 1.4)),
        Row(
            "token_truncate clip_min",
            PPO * ImportanceWeight(high=1.4, low=0.7),
            of_trl.corrected("token_truncate", 0.7, 1.4),
        ),
        Row("token_mask", ICEPOP, of_trl.corrected("token_mask", 0.7, 1.4)),
        Row(
            "sequence_truncate",
            PPO * ImportanceWeight(high=1.4, level="sequence"),
            of_trl.corrected("sequence_truncate", None, 1.4),
        ),
        Row(
            "sequence_mask",
            PPO * ImportanceWeight(high=3.0, level="sequence", beyond="mask"),
            of_trl.corrected("sequence_mask", None, 3.0),
        ),
        Row(
            "get_off_policy_mask",
            PPO * OffPolicyMask(0.05),
            of_trl.loss_of("dapo", epsilon_high=0.3, off_policy_mask_threshold=0.05),
        ),
    ],
    str(of_openrlhf.OPENRLHF): [
        Row("PolicyLoss token clip", PPO * ImportanceWeight(high=1.4, low=0.7), openrlhf("token", "clip")),
        Row("PolicyLoss token mask", ICEPOP, openrlhf("token", "mask")),
        Row(
            "PolicyLoss seq mask",
            PPO * ImportanceWeight(high=math.inf) * GeometricMask(0.7, 1.4),
            openrlhf("seq", "mask"),
        ),
    ],
    str(of_areal.AREAL): [
        Row("token mask", ICEPOP, areal(level="token", action="mask"), tolerance=FLOAT32),
        Row(
            "token clamp",
            PPO * ImportanceWeight(high=1.4, low=0.7),
            areal(level="token", action="clamp"),
            tolerance=FLOAT32,
        ),
        Row(
            "sequence mask",
            PPO * ImportanceWeight(high=1.4, low=0.7, level="geometric", beyond="mask"),
            areal(level="sequence", action="mask"),
            tolerance=FLOAT32,
        ),
        Row(
            "sequence clamp",
            PPO * ImportanceWeight(high=1.4, low=0.7, level="geometric"),
            areal(level="sequence", action="clamp"),
            tolerance=FLOAT32,
        ),
    ],
    "slime": [
        Row(
            "vanilla_tis_function",
            PPO * ImportanceWeight(high=1.4, low=0.7),
            of_slime.weighted("vanilla_tis_function", 0.7, 1.4),
        ),
        Row("icepop_function", ICEPOP, of_slime.weighted("icepop_function", 0.7, 1.4)),
        Row("compute_opsm_mask", PPO * OffPolicyMask(0.05), of_slime.opsm(0.05)),
    ],
}


@pytest.mark.parametrize(("row", "batch"), cells(TABLE))
def test_a_weight_or_a_mask_has_the_value_and_the_gradient_of_the_peer(row: Row, batch: str) -> None:
    agree(row.ours, row.peer, BATCHES[batch], tolerance=row.tolerance)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{name}: {row.name}") for name, rows in TABLE.items() for row in rows]
)
def test_what_is_compared_changes_some_tokens_and_keeps_others(row: Row) -> None:
    batches = [BATCHES[name] for name in NEAR if name != "no advantage"]

    changed = [ours(row.ours, batch).gradient != ours(PPO, batch).gradient for batch in batches]

    assert any(each.any() for each in changed)
    assert not all(each.all() for each in changed)
