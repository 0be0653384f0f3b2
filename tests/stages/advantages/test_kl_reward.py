from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.stages.losses.scoring import scored

from penstock import AdvantageNormalizer, KLReward, TrajectoryGroup
from penstock.errors import InvalidRecord
from penstock.losses import KL
from penstock.testing import drive, group

BEHAVIOR = [0.0, -1.0, -2.0, 0.0, -1.0, -9.0]
REFERENCE = [0.0, -3.0, -1.0, 0.0, -1.5, -1.0]


def made(**columns: Any) -> TrajectoryGroup:
    """Return two sequences of one prompt token and two of the policy's, the last of which does not train."""
    given: dict[str, Any] = {
        "completion_lengths": [2, 2],
        "prompt_length": 1,
        "loss_mask": [[0, 1, 1], [0, 1, 0]],
        "rewards": [1.0, 2.0],
        "behavior_logprobs": BEHAVIOR,
        "ref_logprobs": REFERENCE,
    }
    return group(**(given | columns))


async def test_the_divergence_of_each_sequence_is_taken_off_its_reward() -> None:
    (out,) = await drive(KLReward(0.1), [made()])

    assert out.rewards.tolist() == pytest.approx([1 - 0.1 * (2 - 1), 2 - 0.1 * 0.5])
    assert out.reward_parts["kl"].tolist() == pytest.approx([-0.1, -0.05])


async def test_by_token_it_is_taken_off_the_rewards_of_tokens() -> None:
    (out,) = await drive(KLReward(0.1, level="token"), [made(token_rewards=[0, 1, 0, 0, 0, 4])])

    assert out.token_rewards is not None
    assert out.token_rewards.tolist() == pytest.approx([0, 1 - 0.2, 0.1, 0, -0.05, 4])
    assert out.rewards.tolist() == [1, 2]
    assert out.reward_parts["kl"].tolist() == pytest.approx([-0.1, -0.05])


async def test_either_way_the_advantages_of_sequences_are_the_same() -> None:
    of_sequence = await drive(KLReward(0.1), [made()])
    of_token = await drive(KLReward(0.1, level="token"), [made()])

    (one,) = await drive(AdvantageNormalizer("rloo"), list(of_sequence))
    (other,) = await drive(AdvantageNormalizer("rloo", rewards="both"), list(of_token))

    assert one.advantages is not None
    assert other.advantages is not None
    np.testing.assert_allclose(one.advantages, other.advantages, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
async def test_the_estimators_are_those_of_the_loss(estimator: Any) -> None:
    (out,) = await drive(KLReward(1.0, estimator, level="token"), [made()])

    logprobs, reference = (torch.tensor(column, dtype=torch.float64) for column in (BEHAVIOR, REFERENCE))
    expected = KL(estimator).per_token(scored(logprobs, torch.zeros(6), ref_logprobs=reference)).values
    assert out.token_rewards is not None
    assert out.token_rewards.tolist() == pytest.approx(np.where(out.loss_mask, -expected.numpy(), 0).tolist())


async def test_what_is_exponentiated_stays_finite() -> None:
    far = made(behavior_logprobs=[0, -900.0, -2, 0, -1, -9])

    (out,) = await drive(KLReward(1.0, "k3", level="token"), [far])

    assert out.token_rewards is not None
    assert out.token_rewards[1] == pytest.approx(-(math.exp(20) - 20 - 1))


@pytest.mark.parametrize("missing", ["behavior_logprobs", "ref_logprobs"])
async def test_a_group_that_lacks_log_probabilities_is_named(missing: str) -> None:
    with pytest.raises(InvalidRecord, match=rf"env/7: {missing}: expected a column, got none"):
        await drive(KLReward(0.1), [made(env="env", instance_id="7", **{missing: None})])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLReward(0), "factor: expected a finite number above 0, got 0"),
        (lambda: KLReward(math.inf), "factor: expected a finite number above 0, got inf"),
        (lambda: KLReward(1, "k4"), "estimator: expected one of k1, k2, k3, got 'k4'"),  # type: ignore[arg-type]
        (lambda: KLReward(1, level="group"), "level: expected one of sequence, token, got"),  # type: ignore[arg-type]
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], KLReward], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
