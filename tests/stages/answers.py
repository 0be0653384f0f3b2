"""Groups of completions that are text, and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock import Stage, TrajectoryGroup
from penstock.testing import Driven, drive


class Characters:
    """A tokenizer with one token for each character, which records the decoded tokens."""

    eos_id = 0

    def __init__(self) -> None:
        self.decoded: list[str] = []

    def encode(self, text: str, /) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], /) -> str:
        self.decoded.append("".join(map(chr, ids)))
        return self.decoded[-1]


def answering(
    *completions: str | Sequence[str],
    rewards: Sequence[float] | None = None,
    prompt: str = "?",
    instance_id: str = "0",
    meta: Mapping[str, Any] | None = None,
) -> TrajectoryGroup:
    """Return a group of completions. Several texts are a conversation, in which every other text is the policy's."""
    sequences, masks = [], []
    for completion in completions:
        turns = [prompt, completion] if isinstance(completion, str) else [prompt, *completion]
        sequences.append([ord(c) for turn in turns for c in turn])
        masks.append([i % 2 == 1 for i, turn in enumerate(turns) for _ in turn])
    return TrajectoryGroup.build(
        env="test",
        instance_id=instance_id,
        sequences=sequences,
        loss_mask=masks,
        rewards=[0.0] * len(completions) if rewards is None else rewards,
        meta=meta,
    )


async def drive_text(
    stage: Stage[TrajectoryGroup, TrajectoryGroup], groups: Iterable[TrajectoryGroup]
) -> Driven[TrajectoryGroup]:
    """Run `stage` alone on groups of `answering`."""
    return await drive(stage, groups, tokenizer=Characters())
