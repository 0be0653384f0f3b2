"""AdvantageNormalizer: rewards to advantages, spread over the tokens that train.

Advantages that came with the data are used as they are: not recomputed, not clipped, and their rewards enter no
statistic. Sequences that their sender marked (see `zero_advantages`) get advantage 0. `estimator` computes the
advantages; this stage gathers groups, fills in the column and counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.channels.chunks import MAX_CHUNK, receive_chunks, send_all
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.context import current
from ..._pipeline.graph.flush import FlushableInbox
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import TrajectoryGroup
from ..._schemas.choices import check_choice
from ..._schemas.numbers import finite_number, normalize_counts, number_or_nan
from ..contracts.group_stack import GroupStack
from .estimator import BY_TOKEN, WITHIN_GROUP, Estimate, Estimator, RewardLevel
from .formulas import Mode, RunningStatistics
from .presets import OURS, PRESETS, Library
from .units import Baseline
from .zero_advantages import zero_advantages

GATHERING: tuple[Mode, ...] = ("batch", "gdpo", "reinforce++", "reinforce++-baseline")
"""Modes that compare across groups."""


@dataclass(slots=True)
class AdvantageNormalizer:
    """Fill the `advantages` of groups that have none.

    >>> AdvantageNormalizer("grpo", clip=(-3, 3)).clip
    (-3, 3)

    Args:
        mode: `none` (the reward itself), `grpo`, `dr_grpo`, `rloo`, `maxrl`, `opo` (against the group), `batch`,
            `gdpo`, `reinforce++`, `reinforce++-baseline` (against the `batch_groups` groups that are gathered),
            `global` (against all rewards of the run so far), or `gae` (against the values of a critic, the column
            `values`).
        clip: bounds on an advantage: a number c for [−c, c], or a pair.
        batch_groups: number of groups that are gathered; the last ones of a stream, or before a flush, may be fewer.
            `gae` whitens over the gathered groups, and does not whiten where this is left out.
        rewards: `sequence` for the column `rewards`, `token` for `token_rewards`, `both` for their sum.
        baseline: what is compared with its like in the other rollouts of the group, in the modes against the group:
            `rollout`, `agent` (all that one agent sampled), or `turn` (one turn of an agent, with what it earned from
            there on).
        gamma: discount of `reinforce++` and `gae`, a step for each token that trains; and of a `turn`, a step for each.
        gae_lambda: λ of `gae`.
        preset: the library whose results are computed where they differ from ours.
        components: weight of each reward part that `gdpo` compares, by its name in `reward_parts`: the magnitude of
            the weight that the part was computed with. `score` is the reward itself in groups without such a part.

    Raises:
        InvalidConfig: an unknown mode or preset, bounds in the wrong order, a discount outside [0, 1], or an
            argument missing or without use.
    """

    mode: Mode
    clip: float | tuple[float, float] | None = None
    batch_groups: int | None = None
    rewards: RewardLevel = "sequence"
    baseline: Baseline = "rollout"
    gamma: float = 1.0
    gae_lambda: float = 1.0
    preset: Library | None = None
    components: Mapping[str, float] | None = None
    _estimator: Estimator = field(init=False, repr=False, compare=False)
    """Built from all fields above except `clip`."""
    _seen: RunningStatistics = field(default_factory=RunningStatistics, init=False, repr=False, compare=False)
    """Statistics of mode `global`; saved and restored."""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, Mode)
        check_choice("rewards", self.rewards, RewardLevel)
        if self.preset is not None:
            check_choice("preset", self.preset, Library)
        preset = OURS if self.preset is None else PRESETS[self.preset]
        check_choice(f"mode with preset {self.preset!r}", self.mode, preset.modes)
        normalize_counts(self, "batch_groups")
        low, high = self._bounds
        if not low <= 0 <= high or low == high:
            raise InvalidConfig(f"clip: expected a positive number, or a pair with 0 between, got {self.clip}")
        self._check_batch_groups(gae_is_whitened=preset.gae_is_whitened)
        self._check_baseline()
        _check_discount("gamma", self.gamma, (*BY_TOKEN, *(WITHIN_GROUP if self.baseline == "turn" else ())), self.mode)
        _check_discount("gae_lambda", self.gae_lambda, ("gae",), self.mode)
        self._check_components()
        whitens = self.batch_groups is not None
        self._estimator = Estimator(
            self.mode, self.rewards, self.gamma, self.gae_lambda, whitens, preset, self.components or {}, self.baseline
        )

    def _check_batch_groups(self, *, gae_is_whitened: bool) -> None:
        if self.batch_groups is None:
            if self.mode in GATHERING or (self.mode == "gae" and gae_is_whitened):
                modes = ", ".join([*GATHERING, "gae of most presets"])
                raise InvalidConfig(f"batch_groups: expected a number with {modes}, got none with {self.mode}")
        elif self.mode not in (*GATHERING, "gae"):
            raise InvalidConfig(f"batch_groups: expected none with {self.mode}, got {self.batch_groups}")

    def _check_baseline(self) -> None:
        check_choice("baseline", self.baseline, Baseline)
        if self.baseline == "rollout":
            return
        if self.mode not in WITHIN_GROUP:
            raise InvalidConfig(f"baseline: expected rollout but with {', '.join(WITHIN_GROUP)}, got {self.mode}")
        if self.preset is not None:
            raise InvalidConfig(f"preset: expected none with baseline {self.baseline}, got {self.preset}")

    def _check_components(self) -> None:
        if self.mode != "gdpo":
            if self.components is not None:
                raise InvalidConfig(f"components: expected none with {self.mode}, got {self.components}")
            return
        if not isinstance(self.components, Mapping) or not self.components:
            raise InvalidConfig(f"components: expected weights by name with gdpo, got {self.components!r}")
        if self.rewards != "sequence":
            raise InvalidConfig(f"rewards: expected sequence with gdpo, got {self.rewards}")
        self.components = {
            name: finite_number(f"components[{name!r}]", weight) for name, weight in self.components.items()
        }

    def stage_info(self) -> StageInfo:
        """State the columns that the mode and the rewards need."""
        values = ("values",) if self.mode == "gae" else ()
        rewards = ("token_rewards",) if self.rewards != "sequence" else ()
        return StageInfo(needs_columns=values + rewards, fills_columns=("advantages",))

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. Groups that are gathered are held as owned copies."""
        if self.batch_groups is not None:
            await self._run_gathering(inbox, outbox, self.batch_groups)
            return
        most = 1 if self.mode == "global" else MAX_CHUNK  # the statistics before a group must not depend on the clock
        async for groups in receive_chunks(inbox, most):
            filled = self._filled(groups)
            del groups
            await send_all(outbox, filled)

    async def _run_gathering(
        self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup], batch_groups: int
    ) -> None:
        gathered: list[TrajectoryGroup] = []
        async for group in FlushableInbox(inbox, lambda: bool(gathered)):
            flushed = group is None
            if group is not None and group.advantages is None:
                gathered.append(group.owned())
            elif group is not None:
                await send_all(outbox, self._filled([group]))
            del group  # it may occupy a producer's slots until the next one arrives
            if len(gathered) == batch_groups or flushed:
                filled = self._filled(gathered)
                gathered.clear()
                await send_all(outbox, filled)
        await send_all(outbox, self._filled(gathered))

    def state_dict(self) -> dict[str, float]:
        """Return the running statistics of mode `global`, for a checkpoint."""
        return asdict(self._seen)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            ValueError: the state has other entries.
        """
        if state.keys() != asdict(self._seen).keys():
            raise ValueError(f"expected the entries {sorted(asdict(self._seen))}, got {sorted(state)}")
        count, rest = int(state["count"]), {name: value for name, value in state.items() if name != "count"}
        self._seen = RunningStatistics(count, **rest)

    def _filled(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the same groups, in order, each with advantages."""
        bare = [group for group in groups if group.advantages is None]
        if len(bare) < len(groups):
            given = GroupStack([group for group in groups if group.advantages is not None])
            given.column("advantages", given.loss_mask)
            current().metrics.total("advantages/precomputed", len(given.lengths))
        filled = iter(self._normalized(GroupStack(bare)) if bare else ())
        return [zero_advantages(next(filled) if group.advantages is None else group) for group in groups]

    def _normalized(self, stack: GroupStack) -> list[TrajectoryGroup]:
        estimate = self._estimator.estimate(stack, self._seen)
        self._seen = estimate.seen
        advantages = np.clip(estimate.advantages, *self._bounds)
        self._observe(estimate, estimate.advantages != advantages)
        if self._estimator.is_by_token:
            return stack.with_token_advantages(advantages)
        return stack.with_advantages(advantages)

    @property
    def _bounds(self) -> tuple[float, float]:
        if self.clip is None:
            return -math.inf, math.inf
        low, high = self.clip if isinstance(self.clip, tuple) else (-number_or_nan(self.clip), self.clip)
        return number_or_nan(low), number_or_nan(high)

    def _observe(self, estimate: Estimate, clipped: NDArray[np.bool_]) -> None:
        metrics, deviations = current().metrics, estimate.deviations
        metrics.mean("reward_std", deviations)
        metrics.mean("frac_reward_zero_std", deviations == 0)
        if self.clip is not None:
            metrics.mean("advantages/clip_fraction", clipped, weight=estimate.trains)


def _check_discount(name: str, discount: float, modes: Sequence[str], mode: str) -> None:
    if not 0 <= number_or_nan(discount) <= 1:
        raise InvalidConfig(f"{name}: expected a number from 0 to 1, got {discount}")
    if discount != 1 and mode not in modes:
        raise InvalidConfig(f"{name}: expected 1 but with {' and '.join(modes)}, got {discount} with {mode}")
