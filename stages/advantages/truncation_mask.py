"""TruncationMask: completions that were cut do not train.

A completion that reached its longest length has no end, and often no answer. Its reward measures the bound rather than
the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..._pipeline.channels.channel import ReceiveChannel, SendChannel
from ..._pipeline.graph.context import current
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import StopReason, TrajectoryGroup
from .zero_advantages import masked


@dataclass(frozen=True, slots=True)
class TruncationMask:
    """Mask the tokens of completions that did not end by themselves: those with another stop reason than `STOP`.

    That of a rollout with branches is the reason of its last one.

    Overlong filtering of DAPO (arXiv:2503.14476); in TRL `mask_truncated_completions`, in SkyRL
    `apply_overlong_filtering`. After an AdvantageNormalizer, the rewards of cut completions count in the statistics of
    their group, as in both. Before it, they do not, and a group is compared without them. The Batcher drops a group
    without tokens that train, and losses with `counted="all"` still count its sequences.

    >>> TruncationMask()
    TruncationMask()
    """

    def stage_info(self) -> StageInfo:
        """State that no column is added."""
        return StageInfo(fills_columns=())

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:
        """Run the stage; see `Stage`. Metric `truncation/masked`: share of the rollouts that are masked."""
        async for group in inbox:
            cut = group.stop_reasons[group.rollout_ends()] != StopReason.STOP
            current().metrics.mean("truncation/masked", cut)
            await outbox.send(masked(group, cut[group.rollout_of_sequence()]))
            del group  # it may occupy a producer's slots until the next one arrives
