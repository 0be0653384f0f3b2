"""`/v1/reward`: an agent adds to the reward of its rollout, or to that of a call, by the id of its answer."""

from __future__ import annotations

from typing import Any

import msgspec

from .route import PlainRoute
from .served_rollout import ServedRollout


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward."""

    value: float
    call: str | None = None


async def _add(served: ServedRollout, given: RewardRequest) -> dict[str, Any]:
    served.add_reward(given.value, given.call)
    return {}


REWARD = PlainRoute(msgspec.json.Decoder(RewardRequest), _add)
