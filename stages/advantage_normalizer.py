"""AdvantageNormalizer: rewards to advantages, one a sequence, spread over the tokens that train.

Advantages that came with the data are used as they are: not recomputed, not clipped, and their rewards enter no
statistic. The mathematics stands in `advantages`; this stage gathers, fills in and counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ..pipeline.at_hand import AT_ONCE, at_hand, send_each
from ..pipeline.channel import ReceiveChannel, SendChannel
from ..pipeline.context import current
from ..schemas import TrajectoryGroup
from .advantages import BY_GROUP, Groups, Mode, RunningStatistics, whitened
from .handful import Handful

__all__ = ["AdvantageNormalizer"]


@dataclass(slots=True)
class AdvantageNormalizer:
    """Fill the `advantages` of groups that have none.

    >>> AdvantageNormalizer("grpo", clip=3.0)
    AdvantageNormalizer(mode='grpo', clip=3.0, batch_groups=None)

    Args:
        mode: `none` (the reward itself), `grpo`, `dr_grpo`, `rloo` (against the group), `batch` (against the
            `batch_groups` groups that came together) or `global` (against everything seen in the run).
        clip: bounds on an advantage: a number c for [−c, c], or a pair.
        batch_groups: how many groups mode `batch` gathers; the last batch of a stream holds what is left.

    Raises:
        ValueError: an unknown mode, bounds in the wrong order, or `batch_groups` missing or without use.
    """

    mode: Mode
    clip: float | tuple[float, float] | None = None
    batch_groups: int | None = None
    _seen: RunningStatistics = field(default_factory=RunningStatistics, init=False, repr=False, compare=False)
    """What mode `global` has seen; saved and restored."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        low, high = self._bounds
        if math.isnan(low) or math.isnan(high) or not low <= 0 <= high or low == high:
            raise ValueError(f"clip: expected a positive number, or a pair with 0 between, got {self.clip}")
        if (self.mode == "batch") != (self.batch_groups is not None):
            raise ValueError(f"batch_groups: expected with mode 'batch' and only there, got {self}")
        if self.batch_groups is not None and self.batch_groups < 1:
            raise ValueError(f"batch_groups: expected at least 1, got {self.batch_groups}")

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """See `Stage`. Mode `batch` keeps owned copies of the groups that it gathers."""
        if self.batch_groups is not None:
            await self._run_gathering(inbox, outbox, self.batch_groups)
            return
        most = 1 if self.mode == "global" else AT_ONCE  # what was seen before a group must not depend on the clock
        async for groups in at_hand(inbox, most):
            filled = self._filled(groups)
            del groups
            await send_each(outbox, filled)

    async def _run_gathering(
        self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup], batch_groups: int
    ) -> None:
        gathered: list[TrajectoryGroup] = []
        async for group in inbox:
            if group.advantages is None:
                gathered.append(group.owned())
            else:
                await send_each(outbox, self._filled([group]))
            del group  # it may lie in a producer's slots, and the next one may be long in coming
            if len(gathered) == batch_groups:
                filled = self._filled(gathered)
                gathered.clear()
                await send_each(outbox, filled)
        await send_each(outbox, self._filled(gathered))

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: the running statistics of mode `global`."""
        return asdict(self._seen)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: the state has other entries.
        """
        if state.keys() != asdict(self._seen).keys():
            raise ValueError(f"expected the entries {sorted(asdict(self._seen))}, got {sorted(state)}")
        count, rest = int(state["count"]), {name: value for name, value in state.items() if name != "count"}
        self._seen = RunningStatistics(count, **rest)

    def _filled(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The same groups, in order, all with advantages."""
        bare = [group for group in groups if group.advantages is None]
        if given := sum(len(group) for group in groups if group.advantages is not None):
            current().metrics.total("advantages/given", given)
        filled = iter(self._normalized(Handful(bare)) if bare else ())
        return [next(filled) if group.advantages is None else group for group in groups]

    def _normalized(self, handful: Handful) -> list[TrajectoryGroup]:
        rewards, live = handful.rewards(), handful.live()
        groups = Groups(rewards, live, handful.sizes)
        raw = self._advantages(rewards, live, groups)
        advantages = np.clip(raw, *self._bounds)
        self._observe(groups, live, raw != advantages)
        return handful.with_advantages(advantages)

    def _advantages(self, rewards: NDArray[np.float64], live: NDArray[np.bool_], groups: Groups) -> NDArray[np.float64]:
        match self.mode:
            case "none":
                return np.where(live, rewards, 0.0)
            case "batch":
                return whitened(rewards, live)
            case "global":
                self._seen.update(rewards[live])
                return self._seen.whitened(rewards, live)
            case mode:
                return BY_GROUP[mode](groups)

    @property
    def _bounds(self) -> tuple[float, float]:
        if self.clip is None:
            return -math.inf, math.inf
        return self.clip if isinstance(self.clip, tuple) else (-self.clip, self.clip)

    def _observe(self, groups: Groups, live: NDArray[np.bool_], clipped: NDArray[np.bool_]) -> None:
        metrics = current().metrics
        metrics.mean("reward_std", groups.deviations)
        metrics.mean("frac_reward_zero_std", groups.deviations == 0)
        if self.clip is not None:
            metrics.mean("advantages/clip_fraction", clipped, weight=live)
