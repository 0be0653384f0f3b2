"""`Recording`: the batches that a run has trained, sent again in the order of their steps.

The source of a replay. No sampler, environment or reward runs; the trainer gets the bytes that the recorded one got.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio.to_thread

from ..._pipeline.channels.channel import SendChannel
from ..._pipeline.durability.recording import identity_of_recording, recorded_batch, recorded_steps
from ..._pipeline.durability.resumption import ResumePoint
from ..._pipeline.durability.run_changes import StageFacts
from ..._pipeline.errors import NoRecording
from ..._pipeline.graph.stage_info import StageInfo
from ..._schemas import TrainBatch
from ..._schemas.numbers import normalize_counts
from ..contracts.policies import Tokenizer


@dataclass(frozen=True, slots=True)
class Recording:
    """Send the batches of a recorded run, to train them again.

    >>> Recording("runs/7/recording", last=20).first
    1

    Args:
        folder: the batches, as `SinkTrainer(record=…)` has written them.
        tokenizer: tokenizer of their tokens; None if unknown.
        last: the last step to train; None for all.
        first: the first step to train; a run that is resumed from its folder sets it.

    Raises:
        InvalidConfig: a number that is not whole, or below 1.
    """

    folder: str | Path
    tokenizer: Tokenizer | None = None
    last: int | None = None
    first: int = 1

    def __post_init__(self) -> None:
        normalize_counts(self, "last", "first")

    def stage_info(self) -> StageInfo:
        """State the tokenizer."""
        return StageInfo(tokenizers=() if self.tokenizer is None else (self.tokenizer,))

    def facts(self) -> StageFacts:
        """Return the identity of the recording as fixed."""
        return StageFacts(fixed={"recording": identity_of_recording(Path(self.folder))})

    def resume_from(self, point: ResumePoint) -> Recording:
        """Return the source of a resumed run: it begins behind the last step that was trained."""
        return replace(self, first=point.step + 1)

    def check(self) -> int:
        """Return the last step to train. Blocks.

        Raises:
            NoRecording: there are no batches from the first step on, or none of `last`.
            FileDamaged: that of a step before the last one is missing.
        """
        recorded = recorded_steps(Path(self.folder))
        if self.last is not None and self.last > recorded:
            raise NoRecording(f"expected the batches of {self.last} steps in {self.folder}, got those of {recorded}")
        return self.last or recorded

    async def run(self, outbox: SendChannel[TrainBatch]) -> None:
        """Send one batch after another, to the last one; see `Source`.

        Raises:
            NoRecording: see `check`.
            FileDamaged: a batch is missing, or not as it was written.
        """
        last = await anyio.to_thread.run_sync(self.check)
        for step in range(self.first, last + 1):
            read = partial(recorded_batch, Path(self.folder), step)
            await outbox.send(await anyio.to_thread.run_sync(read))
