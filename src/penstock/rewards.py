"""Components of a reward that are code: functions of the user, of TRL's and of verl's shape."""

from __future__ import annotations

from ._stages.rewards.foreign_functions import trl_reward, verl_reward
from ._stages.rewards.judge import Judge
from ._stages.rewards.math_verify import MathVerify
from ._stages.rewards.reward_functions import RewardComponent, RewardFunction
from ._stages.rewards.reward_input import RewardInput
from ._stages.rewards.reward_model import RewardModel

__all__ = [
    "Judge",
    "MathVerify",
    "RewardComponent",
    "RewardFunction",
    "RewardInput",
    "RewardModel",
    "trl_reward",
    "verl_reward",
]
