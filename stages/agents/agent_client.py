"""The interface of a driving environment: what it is given, `AgentClient`, and what it returns, `Outcome`.

Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import PenstockError
from ..contracts.policies import Call
from ..contracts.sampling_params import SamplingParams


class CallRefused(PenstockError):
    """A call of an agent that is not sampled."""


class ContextTooLong(CallRefused):
    """The prompt of a call leaves no token for a completion: `SourceEnv.max_length` bounds both together."""


class RolloutEnded(CallRefused):
    """A call of a rollout that has ended: nothing that is sampled would train."""


class RolloutDeadline(CallRefused):
    """A call of a rollout whose time is up."""


class CallsUsedUp(CallRefused):
    """A call of a rollout that has made as many as it may."""


class AgentClient(Protocol):
    """The policy, as the agent of one rollout calls it. Every call is recorded, and its tokens train."""

    @property
    def repetition(self) -> int:
        """Return the number of the rollout among those of its prompt."""
        ...

    @property
    def deadline_s(self) -> float:
        """Return the time at which the rollout is given up, on the clock of the event loop."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """Return the parameters of a call that brings none."""
        ...

    async def generate(self, prompt: NDArray[np.int32], sampling: SamplingParams | None = None) -> Call:
        """Return the policy's completion of `prompt`, all tokens of the call. Concurrent calls are sampled together.

        A call continues an earlier one if its prompt begins with the prompt and the completion of that, token by token;
        else a new sequence of the rollout begins.

        Args:
            prompt: [P] token ids, at least one.
            sampling: parameters of this call, within the source's bound on completions. Tokens that end completions
                are added; a seed is combined with that of the rollout.

        Raises:
            InvalidRecord: `prompt` is no row of token ids.
            ContextTooLong: it leaves no token for a completion.
            RolloutEnded: `drive` has returned.
        """
        ...

    async def reward(self, value: float, *, call: str | None = None) -> None:
        """Add `value` to the reward of the rollout; with `SourceEnv.turn_rewards`, it is that of the call named by id.

        Raises:
            ValueError: it is no finite number, or no call has this id.
            RolloutEnded: `drive` has returned.
        """
        ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `DrivingEnvironment.drive`."""

    reward: float = 0.0
    """Added to what `AgentClient.reward` was given."""
    parts: Mapping[str, float] = {}
    """Parts of the reward by name, for metrics and samples."""
    metrics: Mapping[str, float] = {}
    """Other numbers, for the metrics, as means under `env/`."""
    drop: str = ""
    """A reason not to train the rollout: it is counted as filtered, with this reason."""


@runtime_checkable
class DrivingEnvironment(Protocol):
    """An environment that runs an agent: it asks for completions itself, as many as it likes, and is given no turns.

    Rollouts are concurrent: `drive` is called for each, on the event loop.
    """

    async def drive(self, task: int, client: AgentClient, /) -> Any:
        """Do one rollout of prompt number `task`, and return its reward, a number or an `Outcome`."""
        ...
