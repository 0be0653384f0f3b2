"""`AgentRollout`: one rollout of a driving environment. It samples the calls of the agent, and records them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec
import numpy as np
from anyio.lowlevel import checkpoint
from numpy.typing import NDArray

from ..._pipeline.errors import InvalidConfig, InvalidPipeline, PenstockError
from ..._pipeline.graph.context import current
from ..._pipeline.util.extras import extra
from ..contracts.policies import Call, Completion
from ..contracts.rollouts import Branch, RolloutResult, RolloutSampler, as_ids, finite
from ..contracts.sampling_params import SamplingParams
from .agent_client import (
    CallsUsedUp,
    ContextTooLong,
    EndpointAddress,
    Outcome,
    RolloutDeadline,
    RolloutEnded,
    number_of,
    outcome_of,
)
from .agent_commands import CommandResult, run_command
from .call_tree import CallTree

if TYPE_CHECKING:
    from .endpoint.agent_endpoint import AgentEndpoint


ChatFn: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class TokensUnaccounted(PenstockError):
    """A sampled token of a rollout would train twice, or not at all: a fault of penstock."""


def endpoint_type() -> type[AgentEndpoint]:
    """Return the class of the endpoint.

    Raises:
        MissingExtra: a module that it needs is not installed.
    """
    with extra("gateway", "the endpoint of agents"):
        from .endpoint.agent_endpoint import AgentEndpoint  # noqa: PLC0415 (an extra)
    return AgentEndpoint


class AgentRollout:
    """Samples and records the calls of one rollout; an `AgentClient`."""

    def __init__(
        self,
        sampler: RolloutSampler,
        repetition: int,
        *,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        scored: bool = True,
    ) -> None:
        """Begin a rollout; the bounds and `scored` are those of a `DrivingEnvironment`."""
        self.repetition = repetition
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._scored = scored
        self.address: EndpointAddress | None = None
        """At the endpoint."""
        self.chat_by: ChatFn | None = None
        """Answers a request of OpenAI's chat at the endpoint."""
        self._sampler = sampler
        self._tree = CallTree()
        self._begun = 0
        """Calls so far, those without a completion included."""
        self._sampled: dict[str, int] = {}
        """Tokens of each call, by id."""
        self._rewards: dict[str | None, float] = {}
        """By the id of the call."""
        self._ended = False
        self._in_flight: set[anyio.CancelScope] = set()
        """Of the calls that are being sampled: those of an HTTP client do not end with the agent."""
        self.failure: Exception | None = None
        """The error of the policy that ended the rollout."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        """Of the agent: cancelled by an error of the policy, which an agent must not survive."""

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running"
        return f"<AgentRollout {self.repetition} {state}: {len(self._tree)} calls>"

    @property
    def deadline_s(self) -> float:
        """See `AgentClient.deadline_s`."""
        return self._sampler.deadline_s

    @property
    def sampling(self) -> SamplingParams:
        """See `AgentClient.sampling`."""
        return msgspec.structs.replace(self._sampler.params(self._begun), seed=None)

    @property
    def served(self) -> EndpointAddress:
        """Return the address; raises as `check_endpoint`."""
        self.check_endpoint(self.address)
        assert self.address is not None  # noqa: S101 (checked)
        return self.address

    @staticmethod
    def check_endpoint(endpoint: object) -> None:
        """Check that there is an endpoint, or an address at it.

        Raises:
            MissingExtra: there is none, because a module is not installed.
            InvalidPipeline: there is none, because the source has no chat format.
        """
        if endpoint is None:
            endpoint_type()
            raise InvalidPipeline(
                "expected a source with a chat format, by which the endpoint of agents writes their messages as "
                "tokens, got none: SourceEnv(…, chat=ChatFormat(tokenizer))"
            )

    @property
    def base_url(self) -> str:
        """See `AgentClient.base_url`."""
        return self.served.base_url

    @property
    def api_key(self) -> str:
        """See `AgentClient.api_key`."""
        return self.served.api_key

    @property
    def env(self) -> dict[str, str]:
        """See `AgentClient.env`."""
        return self.served.env

    async def run(
        self,
        command: Sequence[str | Path],
        *,
        stdin: str = "",
        folder: str | Path | None = None,
        check: bool = True,
    ) -> CommandResult:
        """See `AgentClient.run`."""
        environment = {} if self.address is None else self.address.env
        return await run_command(command, environment, folder, stdin=stdin, check=check)

    async def chat(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """See `AgentClient.chat`."""
        self.check_endpoint(self.chat_by)
        assert self.chat_by is not None  # noqa: S101 (checked)
        return await self.chat_by({"messages": list(messages), **fields})

    async def generate(self, prompt: NDArray[np.int32], sampling: SamplingParams | None = None) -> Call:
        """See `AgentClient.generate`."""
        await checkpoint()  # an agent that retries what is refused must not block the loop
        self._check_running()
        prompt = as_ids(prompt, least=1)
        number = self._begun
        if number == self._max_calls:
            raise CallsUsedUp(f"expected at most {number} calls, the environment's max_calls, got another")
        params = self._params(number, sampling)
        self._begun += 1
        completion: Completion | None = None
        with anyio.CancelScope() as scope:
            self._in_flight.add(scope)
            try:
                completion = await self._sampler.sample(prompt, params)
            except InvalidConfig:  # of this call
                raise
            except Exception as error:
                self.failure = error
                self.scope.cancel()
                raise
            finally:
                self._in_flight.discard(scope)
        if completion is not None and self._ended:
            current().metrics.total("rollout/dropped_tokens/cancelled", len(completion.tokens))
        self._check_running()
        if completion is None:
            raise ContextTooLong(
                f"expected a prompt that leaves a token for a completion, got {len(prompt)} tokens: shorten the "
                f"conversation, or raise SourceEnv.max_length"
            )
        call = Call(
            id=f"call-{number}",
            temperature=params.logprob_temperature,
            **{name: getattr(completion, name) for name in Completion.__struct_fields__},
        )
        self._tree.add(prompt, call)
        self._sampled[call.id] = len(call.tokens)
        return call

    def _params(self, number: int, own: SamplingParams | None) -> SamplingParams:
        """Return the parameters of call `number`: its own within those of the source, or the source's.

        Raises:
            CallsUsedUp: no token is left for it.
        """
        usual = self._sampler.params(number)
        if self._max_tokens is not None:
            left = self._max_tokens - self.sampled_tokens
            if left < 1:
                raise CallsUsedUp(
                    f"expected a rollout of at most {self._max_tokens} sampled tokens, max_tokens, got another call"
                )
            usual = usual.bounded(left)
        if own is None:
            return usual
        bounded = own.bounded(usual.max_completion_tokens).ending_at(usual.stop_ids)
        if own.seed is None or usual.seed is None:
            return bounded.seeded_by(usual.seed)
        # The same in every call of the rollout with this seed, and another one in each rollout.
        return msgspec.structs.replace(bounded, seed=self._sampler.params(0).seeded_for(own.seed).seed)

    async def reward(self, value: float, *, call: str | None = None) -> None:
        """See `AgentClient.reward`."""
        self.add_reward(value, call)

    def add_reward(self, value: float, call: str | None) -> None:
        """Add to the reward; see `AgentClient.reward`."""
        self._check_running()
        if call is not None and call not in self._sampled:
            raise ValueError(f"call: expected the id of a call of this rollout, got {call!r}")
        self._rewards[call] = finite(self._rewards.get(call, 0.0) + number_of(value, "reward"))

    def _check_running(self) -> None:
        if self._ended and anyio.current_time() >= self.deadline_s:
            raise RolloutDeadline(f"rollout {self.repetition} was given up at its deadline, rollout_timeout_s")
        if self._ended:
            raise RolloutEnded(f"rollout {self.repetition} has ended: a call now would train nothing")

    @property
    def called(self) -> bool:
        """Return whether the agent made a call, be it one that was refused."""
        return self._begun > 0

    @property
    def sampled_tokens(self) -> int:
        """Return the tokens that were sampled so far."""
        return sum(self._sampled.values())

    def end(self) -> None:
        """Refuse all further calls and rewards, and end the calls that are being sampled."""
        self._ended = True
        for scope in self._in_flight:
            scope.cancel()

    def result(self, returned: Any) -> RolloutResult:
        """Return the result of the rollout, given what `drive` returned.

        Raises:
            TypeError, ValueError: that is no finite number and no `Outcome`; or there is no reward at all.
            TokensUnaccounted: a token would not train once.
        """
        if returned is None and not self._rewards and self._scored:
            raise TypeError("drive: expected a reward, a number or an Outcome, or calls of client.reward, got neither")
        outcome = outcome_of(returned) or Outcome()
        unnamed = outcome.reward + self._rewards.pop(None, 0.0)
        branches = self._tree.branches()
        self._check_sampled(branches)
        branches = [
            msgspec.structs.replace(branch, turn_rewards=[self._rewards.get(call.id, 0.0) for call in _calls(branch)])
            for branch in branches
        ] or [Branch(turns=[], turn_rewards=[])]
        *others, last = branches
        rewards = list(last.turn_rewards or [])
        if rewards:
            rewards[-1] += unnamed
        first, *rest = [*others, msgspec.structs.replace(last, turn_rewards=rewards)]
        return RolloutResult(
            turns=first.turns,
            stop_reason=first.stop_reason,
            turn_rewards=first.turn_rewards,
            branches=rest,
            reward=finite(unnamed + sum(self._rewards.values())),
            scored=self._scored,
            parts=outcome.parts,
            metrics=outcome.metrics,
        )

    def _check_sampled(self, branches: list[Branch]) -> None:
        """Check that each sampled token trains once."""
        trained: dict[str, int] = {}
        for branch in branches:
            for call in _calls(branch):
                trained[call.id] = trained.get(call.id, 0) + len(call.tokens)
        for name, tokens in self._sampled.items():
            if trained.get(name, 0) != tokens:
                raise TokensUnaccounted(
                    f"rollout {self.repetition}: {name}: expected to train its {tokens} sampled tokens once, got "
                    f"{trained.get(name, 0)}: report this"
                )


def _calls(branch: Branch) -> list[Call]:
    return [turn for turn in branch.turns if isinstance(turn, Call)]
