"""KLReward: the divergence from a reference policy, subtracted from the reward.

With `KL` in a loss every token has a gradient of its own towards the reference. Here the divergence is part of the
reward, and later stages normalise and discount it. Knows no model: the log-probabilities come with the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import InvalidRecord, TrajectoryGroup
from ..._schemas.choices import check_choice
from ..._schemas.columns import as_column, freeze
from ..._schemas.numbers import normalize_numbers
from ..contracts.kl_estimate import KLEstimator, kl_estimate

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KLReward:
    """Subtract from the rewards `factor` times the divergence of the sampling policy from the reference policy.

    >>> KLReward(0.05)
    KLReward(factor=0.05, estimator='k1', level='sequence')

    Args:
        factor: reward that is subtracted for each nat.
        estimator: of a token's divergence. As a reward, k1 is right: its mean is the divergence, and its
            policy gradient is that of the divergence.
        level: `sequence` subtracts the sum over a sequence's tokens from its reward; `token` subtracts each token's
            from `token_rewards`. AdvantageNormalizer must then use these: `rewards="both"`, or `"token"` if they
            contain the rewards of turns. The level `sequence` leaves them unchanged.

    Raises:
        InvalidConfig: a factor that is not positive, or an unknown estimator or level.
    """

    factor: float
    estimator: KLEstimator = "k1"
    level: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        normalize_numbers(self, "factor")
        check_choice("estimator", self.estimator, KLEstimator)
        check_choice("level", self.level, ("sequence", "token"))

    def stage_info(self) -> StageInfo:
        """State the columns of the two policies."""
        filled = ("token_rewards",) if self.level == "token" else ()
        return StageInfo(needs_columns=("behavior_logprobs", "ref_logprobs"), fills_columns=filled)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. Adds the reward part `kl` with the change of each reward.

        Raises:
            InvalidRecord: a group lacks one of the log-probabilities.
        """
        async for group in inbox:
            await outbox.send(self._penalised(group))
            del group  # it may occupy a producer's slots until the next one arrives

    def _penalised(self, group: TrajectoryGroup) -> TrajectoryGroup:
        penalties = -self.factor * self._divergences(group)
        rollouts = group.rollout_of_sequence()
        of_sequence = np.bincount(rollouts[group.sequence_of_token()], penalties, len(group))[rollouts]
        if self.level == "sequence":
            return group.with_rewards(group.rewards + of_sequence, parts={"kl": of_sequence})
        before = np.zeros(len(penalties)) if group.token_rewards is None else group.token_rewards
        column = as_column("token_rewards", before + penalties, np.float32)
        freeze([column])
        changed = group.with_rewards(group.rewards, parts={"kl": of_sequence})
        return msgspec.structs.replace(changed, token_rewards=column)

    def _divergences(self, group: TrajectoryGroup) -> Floats:
        """Return [N] the estimate of each token, 0 where it does not train."""
        if group.behavior_logprobs is None or group.ref_logprobs is None:
            missing = "behavior_logprobs" if group.behavior_logprobs is None else "ref_logprobs"
            raise InvalidRecord(
                f"{group.env}/{group.instance_id}: {missing}: expected a column, got none: have the sampler record "
                f"log-probabilities, and put a TorchReference before this stage"
            )
        log_ratio = np.subtract(group.behavior_logprobs, group.ref_logprobs, dtype=np.float64)
        return kl_estimate(np.where(group.loss_mask, log_ratio, 0.0), self.estimator, np.exp)
