"""`AgentRollout`: one rollout of a driving environment. It samples the calls of the agent, and records them.

Each of its clients has a key and histories of its own, see `RolloutClient`; bounds, deadline and result are the
rollout's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
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


class RolloutClient:
    """One client of a rollout, an `AgentClient`: it has a key, and histories that no other client continues."""

    def __init__(self, rollout: AgentRollout) -> None:
        self._rollout = rollout
        self.address: EndpointAddress | None = None
        """At the endpoint."""
        self.chat_by: ChatFn | None = None
        """Answers a request of OpenAI's chat at the endpoint."""

    def __repr__(self) -> str:
        return f"<AgentClient of {self._rollout!r}>"

    @property
    def repetition(self) -> int:
        """See `AgentClient.repetition`."""
        return self._rollout.repetition

    @property
    def deadline_s(self) -> float:
        """See `AgentClient.deadline_s`."""
        return self._rollout.deadline_s

    @property
    def sampling(self) -> SamplingParams:
        """See `AgentClient.sampling`."""
        return self._rollout.sampling

    @property
    def served(self) -> EndpointAddress:
        """Return the address; raises as `check_endpoint`."""
        check_endpoint(self.address)
        assert self.address is not None  # noqa: S101 (checked)
        return self.address

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

    def another(self) -> RolloutClient:
        """See `AgentClient.another`."""
        return self._rollout.add_client()

    async def run(
        self,
        command: Sequence[str | Path],
        *,
        stdin: str = "",
        folder: str | Path | None = None,
        check: bool = True,
    ) -> CommandResult:
        """See `AgentClient.run`."""
        self._rollout.check_running()
        environment = {} if self.address is None else self.address.env
        return await run_command(command, environment, folder, stdin=stdin, check=check)

    async def chat(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        """See `AgentClient.chat`."""
        check_endpoint(self.chat_by)
        assert self.chat_by is not None  # noqa: S101 (checked)
        return await self.chat_by({"messages": list(messages), **fields})

    async def generate(self, prompt: NDArray[np.int32], sampling: SamplingParams | None = None) -> Call:
        """See `AgentClient.generate`."""
        return await self._rollout.generate(self, prompt, sampling)

    async def reward(self, value: float, *, call: str | None = None) -> None:
        """See `AgentClient.reward`."""
        self.add_reward(value, call)

    def add_reward(self, value: float, call: str | None) -> None:
        """Add to the reward; see `AgentClient.reward`."""
        self._rollout.add_reward(value, self if call is None else call)


class AgentRollout:
    """Samples and records the calls of one rollout, those of all its clients."""

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
        self._sampler = sampler
        self._tree = CallTree()
        self._begun = 0
        """Calls so far, those without a completion included."""
        self._sampled: dict[str, int] = {}
        """Tokens of each call, by id."""
        self._rewards: dict[str | RolloutClient, float] = {}
        """By the id of the call, or by the client that named none."""
        self._ended = False
        self._in_flight: set[anyio.CancelScope] = set()
        """Of the calls that are being sampled: those of an HTTP client do not end with the agent."""
        self.failure: Exception | None = None
        """The error of the policy that ended the rollout."""
        self.scope: anyio.CancelScope = anyio.CancelScope()
        """Of the agent: cancelled by an error of the policy, which an agent must not survive."""
        self._numbers: dict[Hashable, int] = {}
        """Of its clients, the agents, in the order in which they were made."""
        self.serve_client: Callable[[RolloutClient], None] | None = None
        """Gives a client its key at the endpoint."""

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
        usual = self._sampler.params(self._begun)
        return usual if usual.seed is None else msgspec.structs.replace(usual, seed=None)

    def add_client(self) -> RolloutClient:
        """Return another client.

        Raises:
            RolloutEnded, RolloutDeadline: the rollout has ended.
        """
        self.check_running()
        client = RolloutClient(self)
        self._numbers[client] = len(self._numbers)
        if self.serve_client is not None:
            self.serve_client(client)
        return client

    async def generate(
        self, client: RolloutClient, prompt: NDArray[np.int32], sampling: SamplingParams | None = None
    ) -> Call:
        """Return the completion of a client's call; see `AgentClient.generate`."""
        await checkpoint()  # an agent that retries what is refused must not block the loop
        self.check_running()
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
        self.check_running()
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
        self._tree.add(prompt, call, client)
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

    def add_reward(self, value: float, earner: str | RolloutClient) -> None:
        """Add to the reward of a call by its id, or of a client; see `AgentClient.reward`."""
        self.check_running()
        if isinstance(earner, str) and earner not in self._sampled:
            raise ValueError(f"call: expected the id of a call of this rollout, got {earner!r}")
        self._rewards[earner] = finite(self._rewards.get(earner, 0.0) + number_of(value, "reward"))

    def check_running(self) -> None:
        """Raise RolloutEnded or RolloutDeadline if it has ended."""
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
        branches = self._tree.branches() or [Branch(turns=[])]
        self._check_sampled(branches)
        rewards, clients = self._turn_rewards(branches, outcome.reward), self._tree.clients
        first, *rest = [
            msgspec.structs.replace(
                branch,
                turn_rewards=[rewards.get(call.id, 0.0) for call in _calls(branch)],
                agent=next((self._numbers[clients[call.id]] for call in _calls(branch)), 0),
            )
            for branch in branches
        ]
        return RolloutResult(
            turns=first.turns,
            stop_reason=first.stop_reason,
            turn_rewards=first.turn_rewards,
            agent=first.agent,
            branches=rest,
            reward=finite(outcome.reward + sum(self._rewards.values())),
            scored=self._scored,
            parts=outcome.parts,
            metrics=outcome.metrics,
        )

    def _turn_rewards(self, branches: Sequence[Branch], returned: float) -> dict[str, float]:
        """Return rewards by the id of a call. One that names no call is that of the last one of its client.

        What `drive` returned, and the reward of a client without a call that trains, are those of the last one of all.
        """
        calls = [call for branch in branches for call in _calls(branch)]
        if not calls:
            return {}
        clients = self._tree.clients
        last_of = {clients[call.id]: call.id for call in calls}
        last = calls[-1].id
        rewards = {last: returned}
        for earner, value in self._rewards.items():
            call = earner if isinstance(earner, str) else last_of.get(earner, last)
            rewards[call] = rewards.get(call, 0.0) + value
        return rewards

    def _check_sampled(self, branches: Sequence[Branch]) -> None:
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
