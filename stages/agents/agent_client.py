"""The interface of a driving environment: what it is given, `AgentClient`, and what it returns, `Outcome`.

Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._pipeline.errors import PenstockError
from ..contracts.policies import Call
from ..contracts.rollouts import finite
from ..contracts.sampling_params import SamplingParams
from .agent_commands import CommandResult


class CallRefused(PenstockError):
    """A call of an agent that is not sampled."""


class ContextTooLong(CallRefused):
    """The prompt of a call leaves no token for a completion: `SourceEnv.max_length` bounds both together."""


class RolloutEnded(CallRefused):
    """A call of a rollout that has ended: nothing that is sampled would train."""


class RolloutDeadline(CallRefused):
    """A call of a rollout whose time is up."""


class CallsUsedUp(CallRefused):
    """A call of a rollout that has made as many as it may, or has sampled as many tokens."""


class EndpointAddress(msgspec.Struct, frozen=True):
    """The address of a rollout at the endpoint of its worker: what clients of OpenAI and Anthropic are given."""

    base_url: str
    """Of OpenAI's API. It has the key in its path, so that a client without a key needs nothing else."""
    api_key: str

    @property
    def env(self) -> dict[str, str]:
        """Return the environment variables that clients and agents read, for a command."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }


class AgentClient(Protocol):
    """The policy, as the agent of one rollout calls it. Every call is recorded, and its tokens train."""

    @property
    def base_url(self) -> str:
        """Return the URL of OpenAI's API for this rollout, on loopback.

        Raises:
            InvalidPipeline: the source has no `chat`, so that there is no endpoint.
            MissingExtra: the endpoint needs an extra.
        """
        ...

    @property
    def api_key(self) -> str:
        """Return the key of the rollout; raises as `base_url`."""
        ...

    @property
    def env(self) -> dict[str, str]:
        """Return environment variables for an agent's command, OPENAI_BASE_URL and others; raises as `base_url`."""
        ...

    @property
    def repetition(self) -> int:
        """Return the number of the rollout among those of its prompt."""
        ...

    @property
    def deadline_s(self) -> float:
        """Return the time at which the rollout is given up, on the clock of the event loop, `time.monotonic`."""
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
            CallsUsedUp: the environment has `max_calls` or `max_tokens`, and these were made or sampled.
            RolloutEnded, RolloutDeadline: `drive` has returned, or was given up.
        """
        ...

    async def chat(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """Return the policy's turn after `messages`, a message of the assistant.

        Args:
            messages: those of OpenAI's chat completions.
            fields: other fields of the request: `tools`, `temperature`, `max_tokens`.

        Raises:
            InvalidPipeline, MissingExtra: see `base_url`.
            InvalidConfig, InvalidData: a field cannot be obeyed, or the template refuses the messages.
            ContextTooLong, RolloutEnded, RolloutDeadline: see `generate`. Once its calls are used up, the answer is a
                final message.
        """
        ...

    def another(self) -> AgentClient:
        """Return another client of the same rollout, for a second persona of the agent.

        It has a key of its own. Its calls continue those of no other client, so that its turns are sequences of their
        own, and what `reward` adds at it is the reward of its last turn.

        Raises:
            RolloutEnded, RolloutDeadline: `drive` has returned, or was given up.
        """
        ...

    async def reward(self, value: float, *, call: str | None = None) -> None:
        """Add `value` to the reward of the rollout.

        With `SourceEnv.turn_rewards`, it is that of the call named by id, or of this client's last one.

        Raises:
            ValueError: it is no finite number, or no call has this id.
            RolloutEnded: `drive` has returned.
        """
        ...

    async def run(
        self,
        command: Sequence[str | Path],
        *,
        stdin: str = "",
        folder: str | Path | None = None,
        check: bool = True,
    ) -> CommandResult:
        """Run an agent's command with the variables of `env`, if there is an endpoint, and return its end.

        All its processes end with it, with the rollout, and with the worker, even if that is killed. Its temporary
        files are in a folder of its own, TMPDIR, which is removed.

        Args:
            command: program and arguments; no shell.
            stdin: text that it reads.
            folder: working directory; by default that of the worker.
            check: whether another status than 0 is an error.

        Raises:
            CommandFailed: it could not be started, or ended with another status while `check` is true.
            RolloutEnded, RolloutDeadline: the rollout has ended; nothing is started.
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

    An attribute `max_calls`, if there is one, bounds the calls of a rollout, and `max_tokens` the tokens that are
    sampled for it; several calls at once may exceed these together. At the endpoint the next call is answered by a
    message without calls of tools, on which agents end.

    A method `prompt`, as that of `PromptSource`, gives the facts about a prompt for the `meta` of its group. An
    attribute `scored` is False if a later stage gives the reward, so that `drive` may return None.

    Rollouts are concurrent. A coroutine function is called on the event loop, with an `AgentClient`; a method `open`
    beside it, an async context manager, is entered in each worker before the first one. A plain function
    may block, so it is called in a process of its own, with a `BlockingAgentClient`.
    """

    def drive(self, task: int, client: Any, /) -> Any:
        """Do one rollout of prompt number `task`, and return its reward, a number or an `Outcome`."""
        ...


def outcome_of(returned: Any) -> Outcome | None:
    """Return what `drive` returned as an `Outcome` of finite numbers; None if it returned nothing.

    Raises:
        TypeError, ValueError: it is neither a finite number nor an `Outcome` of these.
    """
    if returned is None:
        return None
    found = returned if isinstance(returned, Outcome) else Outcome(reward=returned)
    return msgspec.structs.replace(
        found,
        reward=number_of(found.reward, "reward"),
        parts={name: number_of(value, f"parts[{name!r}]") for name, value in found.parts.items()},
        metrics={name: number_of(value, f"metrics[{name!r}]") for name, value in found.metrics.items()},
    )


def number_of(value: Any, name: str) -> float:
    """Return a number of an agent's. Texts and truth values are none, though Python converts them.

    Raises:
        TypeError, ValueError: it is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a finite number, such as a float, got {type(value).__name__}")
    return finite(value)
