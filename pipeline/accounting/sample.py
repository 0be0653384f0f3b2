"""Samples: a few of the trajectories that a step trained, as text, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["best", "worst"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory that an optimizer step trained; a line of `samples.jsonl`."""

    step: int
    """The optimizer step."""
    kind: Kind
    """Its place in the step by reward: among the best, or among the worst."""
    rank: int
    """1 for the best of the best, and for the worst of the worst."""
    env: str
    instance_id: str
    """The prompt within the environment."""
    repetition: int
    """The number of the completion of its prompt."""
    prompt: str
    """The text before the first token that trains."""
    completion: str
    """The text from there on; answers of the environment between several turns are included."""
    completion_tokens: int
    """The number of tokens that train."""
    reward: float
    parts: dict[str, float]
    """The parts of the reward, by name."""
    advantage: float | None
    """The mean over the tokens that train; None where the batch has no advantages."""
    stop_reason: str
    """The name of a StopReason, in small letters."""
    policy_version: int
    """The oldest weights that sampled it."""


SampleSink: TypeAlias = Callable[[Sequence[Sample], int], None]
"""Takes the samples of one optimizer step, and the step. It is called in a thread, and may block."""
