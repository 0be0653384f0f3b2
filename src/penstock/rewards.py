"""User functions as components of a reward."""

from __future__ import annotations

from ._stages.rewards.reward_functions import RewardFunction, RewardInput

__all__ = ["RewardFunction", "RewardInput"]
