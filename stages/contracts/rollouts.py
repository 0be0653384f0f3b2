"""`RolloutResult`: the result of one rollout of an environment, and `RolloutSampler`, which samples its turns.

Knows no environment and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import PenstockError
from ..._schemas import InvalidRecord, StopReason
from .policies import Completion
from .sampling_params import SamplingParams

Turn: TypeAlias = NDArray[np.int32] | Completion
"""A completion of the policy, or the token ids of anything else."""


LARGEST_ID = 2**31 - 1

LARGEST_NUMBER = float(np.finfo(np.float32).max)

ROLLOUT_TIMEOUT_S = 300.0
"""Bound on the time of a rollout, where none is given."""

BRANCHES = 8
"""Sequences of the greatest length whose tokens a rollout may have in all: batches have room for them."""


class RolloutFiltered(PenstockError):
    """An environment gives a rollout no reward, because it is not to be trained; it is counted as filtered."""


class Branch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence of a rollout, turn by turn."""

    turns: Sequence[Turn]
    """A Completion for each turn of the policy that trains here, bare token ids for all others. The prompt comes first.
    """
    stop_reason: StopReason = StopReason.STOP
    turn_rewards: Sequence[float] | None = None
    """Reward of each Completion, where known; the sum over all sequences is the reward of the rollout."""
    agent: int = 0
    """Number of the agent that sampled it, among those of the rollout."""

    @property
    def completions(self) -> int:
        """Return the number of turns of the policy."""
        return sum(isinstance(turn, Completion) for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(len(turn.tokens) for turn in self.turns if isinstance(turn, Completion))


class RolloutResult(Branch, frozen=True, kw_only=True, eq=False):
    """The result of one rollout: its first or only sequence, and what belongs to the whole."""

    reward: float
    """Reward of the whole rollout."""
    branches: Sequence[Branch] = ()
    """Its further sequences, if the history before some turns is no continuation of that before others. The last one
    is that with which the rollout ended."""
    parts: Mapping[str, float] = {}
    """Parts of the reward by name; 0 for a rollout that lacks one of its group."""
    metrics: Mapping[str, float] = {}
    """Numbers for the metrics, as means under `env/`."""
    scored: bool = True
    """True if the environment gave the reward; else it is 0, and a later stage gives one."""
    meta: Mapping[str, Any] = {}
    """Facts about the prompt, for the `meta` of the group: it takes those of its first rollout. Values that JSON can
    hold."""

    @property
    def sequences(self) -> list[Branch]:
        """Return all sequences."""
        return [self, *self.branches]


class RolloutSampler(Protocol):
    """Samples the turns of one rollout."""

    @property
    def deadline_s(self) -> float:
        """Return the time at which the rollout is given up, on the clock of the event loop."""
        ...

    @property
    def most_tokens(self) -> int | None:
        """Return the bound on the tokens of all sequences of the rollout; None for none."""
        ...

    def params(self, turn: int, /) -> SamplingParams:
        """Return the parameters of a turn of the policy, from 0 on, with a seed of its own if there is one."""
        ...

    async def sample(self, prompt: NDArray[np.int32], params: SamplingParams, /) -> Completion | None:
        """Return the policy's completion of `prompt`; None if the bound on sequences leaves no token for one."""
        ...


async def next_turn(sampler: RolloutSampler, turns: Sequence[Turn]) -> Completion | None:
    """Return the policy's next turn after `turns`; see `RolloutSampler.sample`."""
    turn = sum(isinstance(turn, Completion) for turn in turns)
    return await sampler.sample(np.concatenate([tokens_of(turn) for turn in turns]), sampler.params(turn))


def tokens_of(turn: Turn) -> NDArray[np.int32]:
    """Return the tokens of a turn."""
    return turn.tokens if isinstance(turn, Completion) else turn


def as_ids(tokens: Any, *, least: int = 0) -> NDArray[np.int32]:
    """Return token ids as an array.

    Raises:
        InvalidRecord: they are no row of at least `least` ids.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > LARGEST_ID)):
        raise InvalidRecord(f"tokens: expected a row of ids of 0 or more, got {ids.dtype} {ids.shape}")
    if len(ids) < least:
        raise InvalidRecord(f"tokens: expected at least {least}, got {len(ids)}")
    return ids.astype(np.int32, copy=False)


def finite(value: Any) -> float:
    """Return a number of an environment's, such as a reward, as a float.

    Raises:
        ValueError, TypeError: it is no finite number that float32 can hold, as records have it.
    """
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    if abs(number) > LARGEST_NUMBER:
        raise ValueError(f"expected a number of at most {LARGEST_NUMBER:.3g}, got {number:.3g}")
    return number
