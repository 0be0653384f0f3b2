"""Long completions: a penalty that grows towards the longest length, and a mask of those that were cut."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import AdvantageNormalizer, Batcher, RewardBridge, StopReason, TruncationMask
from penstock.testing import drive, group

LENGTHS = [1, 60, 80, 81, 90, 99, 100]


def trl_soft_overlong(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    """trl/rewards/other_rewards.py:130-137 of trl-1.16.0.

    if completion_length <= self.max_completion_len - self.soft_punish_cache:
        rewards.append(0.0)
    elif self.max_completion_len - self.soft_punish_cache < completion_length <= self.max_completion_len:
        rewards.append((self.max_completion_len - self.soft_punish_cache - completion_length) / self.soft_punish_cache)
    else:
        rewards.append(-1.0)
    """
    safe = max_completion_len - soft_punish_cache
    if length <= safe:
        return 0.0
    return (safe - length) / soft_punish_cache if length <= max_completion_len else -1.0


def verl_overlong(length: int, max_resp_len: int, overlong_buffer_len: int, factor: float) -> float:
    """verl/experimental/reward_loop/reward_manager/dapo.py:110-113 of verl-0.9.1; skyrl's example main_dapo.py:63-70.

    expected_len = self.max_resp_len - overlong_buffer_len
    exceed_len = valid_response_length - expected_len
    overlong_reward = min(-exceed_len / overlong_buffer_len * overlong_penalty_factor, 0)
    """
    return min(-(length - (max_resp_len - overlong_buffer_len)) / overlong_buffer_len * factor, 0)


async def penalties(lengths: list[int], **overlong: float) -> list[float]:
    bridge = RewardBridge.from_config({"overlong": overlong})
    (out,) = await drive(bridge, [group(completion_lengths=lengths)])
    np.testing.assert_allclose(out.rewards, 1 + out.reward_parts["overlong"], rtol=1e-6)
    penalties: list[float] = out.reward_parts["overlong"].tolist()
    return penalties


async def test_the_penalty_of_long_completions_is_that_of_trl() -> None:
    expected = [trl_soft_overlong(length, 100, 20) for length in [*LENGTHS, 150]]

    assert await penalties([*LENGTHS, 150], length=100, cache=20) == pytest.approx(expected)


async def test_the_penalty_is_that_of_verl_and_skyrl_up_to_the_longest_length() -> None:
    expected = [verl_overlong(length, 100, 20, 0.5) for length in LENGTHS]

    assert await penalties(LENGTHS, length=100, cache=20, penalty=0.5) == pytest.approx(expected)


async def test_only_tokens_that_train_make_a_completion_long() -> None:
    bridge = RewardBridge.from_config({"overlong": {"length": 2, "cache": 1}})

    (out,) = await drive(bridge, [group(completion_lengths=[3], prompt_length=1, loss_mask=[[0, 1, 0, 0]])])

    assert out.rewards.tolist() == [1]


CUT = [int(reason) for reason in (StopReason.LENGTH, StopReason.STOP, StopReason.STOP, StopReason.ABORT)]


async def test_completions_that_were_cut_do_not_train() -> None:
    given = group(completion_lengths=[2, 1, 2, 1], prompt_length=1, stop_reasons=CUT)

    (out,) = await drive(TruncationMask(), [given])

    assert out.loss_mask.tolist() == [False] * 4 + [True] + [False, True, True] + [False, False]


async def test_after_the_normalizer_their_rewards_count_and_before_it_they_do_not() -> None:
    given = group(completion_lengths=[1] * 4, prompt_length=1, rewards=[0, 1, 0, 0], stop_reasons=CUT)

    (compared,) = await drive(AdvantageNormalizer("dr_grpo"), [given])
    (after,) = await drive(TruncationMask(), [compared])
    (masked,) = await drive(TruncationMask(), [given])
    (before,) = await drive(AdvantageNormalizer("dr_grpo"), [masked])

    assert after.advantages is not None
    assert before.advantages is not None
    assert after.advantages[1::2].tolist() == [0, 0.75, -0.25, 0]
    assert before.advantages[1::2].tolist() == [0, 0.5, -0.5, 0]


async def test_groups_of_which_nothing_was_cut_are_the_same_objects() -> None:
    given = group(completion_lengths=[2, 2])

    (out,) = await drive(TruncationMask(), [given])

    assert out is given


async def test_a_group_of_which_everything_was_cut_is_dropped_by_the_batcher() -> None:
    cut = group(completion_lengths=[2, 2], stop_reason=StopReason.LENGTH, advantages=np.ones(8))
    other = group(completion_lengths=[2, 2], instance_id="1", advantages=np.ones(8))

    masked = await drive(TruncationMask(), [cut, other])
    (batch,) = await drive(Batcher(max_tokens=100), list(masked))

    assert [packed.instance_id for packed in batch.groups] == ["1"]
    assert (batch.loss_rollouts, batch.total_rollouts) == (2, 4)
