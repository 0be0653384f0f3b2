"""The identity of a trajectory, and the reason why it stopped: the two small values that every record carries."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .bounds import Line

MAX_REPETITION_ID = 65_535
"""The largest repetition id. The ledger keeps a bit for each, so that a seed or a hash would take gigabytes there."""


class GroupId(NamedTuple):
    """The prompt that a group answers: a hashable, comparable value, not a string glued of parts."""

    env: Line
    """Name of the environment."""
    instance_id: Line
    """Name of the prompt within the environment, never reused within a run."""


class TrajectoryId(NamedTuple):
    """One rollout: one completion of one prompt.

    >>> TrajectoryId("chain_sum", "17", 3).group
    GroupId(env='chain_sum', instance_id='17')
    """

    env: Line
    instance_id: Line
    repetition_id: int
    """The number of the rollout among those of the prompt, from 0."""

    @property
    def group(self) -> GroupId:
        """Return the prompt that this trajectory answers."""
        return GroupId(self.env, self.instance_id)


class StopReason(IntEnum):
    """The reason why sampling ended; the value is stored in the `stop_reasons` column."""

    STOP = 0
    """The policy ended its answer, or the environment its episode."""
    LENGTH = 1
    """The token allowance ran out."""
    ABORT = 2
    """Sampling was interrupted from outside."""
    TOOL = 3
    """A tool call was left open."""
    ERROR = 4
    """The environment failed after some tokens were sampled."""
