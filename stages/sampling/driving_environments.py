"""The rollouts of a driving environment: `drive` is called for each, with a client whose calls are recorded.

It runs on the event loop if it is a coroutine function; else it may block, and runs in a process of its own. Where
there is a chat format, an endpoint of this worker answers the calls of clients by HTTP.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio.to_thread
import msgspec
from msgspec import structs

from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.errors import CallProcessDied, MissingExtra, NothingTrained
from ..._pipeline.graph.context import current
from ..._pipeline.util.user_code import await_user, call_user
from ..._pipeline.workers.call_process import Callee, CallProcesses
from ..._pipeline.workers.worker_payload import write_payload
from ..._schemas.conversion import decode_json
from ..agents import agent_process
from ..agents.agent_client import DrivingEnvironment, EndpointAddress, Outcome
from ..agents.agent_process import DriveRequest, RolloutReply
from ..agents.agent_rollout import AgentRollout, RolloutClient, TokensUnaccounted, check_endpoint, endpoint_type
from ..agents.blocking_client import BlockingAgentClient
from ..contracts.prompts import PromptSource
from ..contracts.rollouts import BRANCHES, RolloutFiltered, RolloutResult, RolloutSampler, tokens_of
from ..contracts.threads import Threads
from ..tokenizers.chat_format import ChatFormat
from .environment_calls import EnvironmentFailed, called, failed, unchanged

if TYPE_CHECKING:
    from ..agents.endpoint.agent_endpoint import AgentEndpoint
    from ..agents.endpoint.served_rollout import ServedRollout

CALLEE = Callee(agent_process.__name__, "an agent", "penstock.agents", starts_others=True)

OPTIONS = ("max_calls", "max_tokens", "scored")
"""Attributes that an environment may have."""

PATIENCE_S = 5.0
"""Time after the deadline of a rollout in which its agent has to end before it is named."""

SILENT_LIMIT = 20
"""Rollouts of an agent that has never made a call, which end the run: it does not find the policy."""

CALLING = (
    "call client.generate, or give client.base_url to its client of OpenAI, or OPENAI_BASE_URL of client.env to its "
    "command"
)
"""To do for an agent that makes no call."""

log = get_logger("penstock.agents")

Drive: TypeAlias = Callable[[int, RolloutClient], Coroutine[Any, Any, Any]]
"""Does a rollout, and returns what `drive` returned."""


@asynccontextmanager
async def driving_tasks(
    env: DrivingEnvironment, make_env: Callable[[], Any], threads: Threads, chat: ChatFormat | None
) -> AsyncGenerator[Callable[[int], Coroutine[Any, Any, Any]]]:
    """Yield the function of the prompts of `env`, see `TaskFn`; the endpoint and the processes end with the body.

    Raises:
        InvalidPipeline: `drive` blocks, and there is no `chat`.
        MissingExtra: `drive` blocks, and the endpoint needs an extra.
    """
    async with AsyncExitStack() as stack:
        endpoint: AgentEndpoint | None = None
        if chat is not None and (made := await anyio.to_thread.run_sync(_endpoint, chat)) is not None:
            endpoint = await stack.enter_async_context(made)
        drive: Drive = env.drive
        if not inspect.iscoroutinefunction(env.drive):
            check_endpoint(endpoint)
            drive = (await stack.enter_async_context(_processes(make_env))).drive
        elif (opened := getattr(env, "open", None)) is not None:
            await stack.enter_async_context(opened())
        yield _DrivingTasks(env, drive, threads, endpoint).begin


def _endpoint(chat: ChatFormat) -> AgentEndpoint | None:
    """Return an endpoint that is not served yet; None if what it needs is not installed."""
    with suppress(MissingExtra):
        return endpoint_type()(chat)
    return None


@asynccontextmanager
async def _processes(make_env: Callable[[], Any]) -> AsyncGenerator[_Processes]:
    payload = await anyio.to_thread.run_sync(write_payload, make_env)
    processes = CallProcesses(CALLEE)
    try:
        yield _Processes(processes, f"/proc/{os.getpid()}/fd/{payload}")
    finally:
        await processes.close()
        os.close(payload)


class _Processes:
    """The processes of an environment that blocks; each drives one rollout at a time."""

    def __init__(self, processes: CallProcesses, payload: str) -> None:
        self._processes = processes
        self._payload = payload

    async def drive(self, task: int, client: RolloutClient) -> Any:
        """Return what `drive` returns in a process; that ends if this is cancelled."""
        blocking = BlockingAgentClient(
            address=client.served, repetition=client.repetition, deadline_s=client.deadline_s
        )
        request = DriveRequest(payload=self._payload, task=task, client=blocking)
        try:
            async with self._processes.borrowed() as process:
                received = await process.ask(msgspec.json.encode(request).decode())
        except CallProcessDied as error:
            raise EnvironmentFailed(str(error)) from error
        driven = decode_json(received, RolloutReply)
        if driven.error:
            raise EnvironmentFailed(f"environment raised {driven.error}")
        return driven.outcome


class _DrivingTasks:
    """The prompts of a driving environment."""

    def __init__(self, env: DrivingEnvironment, drive: Drive, threads: Threads, endpoint: AgentEndpoint | None) -> None:
        self._env = env
        self._drive = drive
        self._threads = threads
        self._endpoint = endpoint
        self._options = {name: getattr(env, name) for name in OPTIONS if hasattr(env, name)}
        self._silent: int | None = 0
        """Rollouts without a call; None once there was one with a call."""

    async def begin(self, number: int) -> Callable[[int, RolloutSampler], Coroutine[Any, Any, RolloutResult]]:
        """Begin a prompt; see `TaskFn`."""
        meta: Mapping[str, Any] = {}
        if isinstance(self._env, PromptSource):
            meta = (await called(self._threads, partial(self._env.prompt, number), unchanged)).meta
        return partial(self._rollout, number, meta)

    async def _rollout(
        self, number: int, meta: Mapping[str, Any], repetition: int, sampler: RolloutSampler
    ) -> RolloutResult:
        rollout, state = AgentRollout(sampler, repetition, **self._options), "cancelled"
        try:
            with self._served(rollout):
                result = await self._driven(number, rollout)
            _check_size(result, sampler.most_tokens)
            state = ""
            self._check_calls(rollout)
        except EnvironmentFailed as error:
            state = "filtered" if isinstance(error.__cause__, RolloutFiltered) else "failed"
            raise
        finally:
            rollout.end()
            if state and rollout.sampled_tokens:
                current().metrics.total(f"rollout/dropped_tokens/{state}", rollout.sampled_tokens)
        return structs.replace(result, meta=meta)

    def _check_calls(self, rollout: AgentRollout) -> None:
        """Check that the agent makes calls; a rollout without one is rejected where all are that sample nothing.

        Raises:
            NothingTrained: none of the first `SILENT_LIMIT` rollouts had one.
        """
        if rollout.called or self._silent is None:
            self._silent = None
            return
        self._silent += 1
        if self._silent == SILENT_LIMIT:
            raise NothingTrained(
                f"expected the agent {_name_of(self._env)} to call the policy, got no call in its first {SILENT_LIMIT} "
                f"rollouts: {CALLING}"
            )

    @contextmanager
    def _served(self, rollout: AgentRollout) -> Iterator[None]:
        """Answer calls of the rollout's clients at the endpoint within the body, if there is one."""
        if self._endpoint is None:
            yield
            return
        endpoint = self._endpoint
        clients: list[ServedRollout] = []
        with ExitStack() as stack:

            def serve(client: RolloutClient) -> None:
                served = stack.enter_context(endpoint.serve(client, clients[0].shared if clients else None))
                clients.append(served)
                client.address = EndpointAddress(served.base_url, served.key)
                client.chat_by = partial(endpoint.chat, served)

            rollout.serve_client = serve
            yield
        metrics = current().metrics
        for served in clients:
            for reason, calls in served.branched.items():
                metrics.total(f"rollout/branched/{reason}", calls)
            if served.malformed_calls:
                metrics.total("rollout/malformed_tool_calls", served.malformed_calls)

    async def _driven(self, number: int, rollout: AgentRollout) -> RolloutResult:
        outcome: Any = None
        naming = asyncio.get_running_loop().call_at(rollout.deadline_s + PATIENCE_S, self._name_stubborn)
        try:
            with rollout.scope:
                outcome = await await_user(self._drive, number, rollout.add_client())
            if rollout.failure is None:
                if isinstance(outcome, Outcome) and outcome.drop:
                    raise RolloutFiltered(outcome.drop)  # noqa: TRY301 (as a raised one)
                return call_user(rollout.result, outcome)
        except Exception as error:
            if rollout.failure is None:
                if isinstance(error, EnvironmentFailed | TokensUnaccounted):
                    raise
                raise failed(error) from error
        finally:
            naming.cancel()
        assert rollout.failure is not None  # noqa: S101 (else it has returned or raised)
        raise rollout.failure

    def _name_stubborn(self) -> None:
        log.warning(
            "agent_goes_on",
            agent=_name_of(self._env),
            reason=f"it goes on {PATIENCE_S:g} s after the deadline of its rollout, and cannot be ended on this loop",
            remedy="have it catch Exception, and not its cancellation (except:, except BaseException:); or write drive "
            "as a function that blocks, which runs in a process of its own",
        )


def _check_size(result: RolloutResult, most_tokens: int | None) -> None:
    """Check that a batch has room for the sequences of a rollout, which are as many as its agent makes.

    Raises:
        EnvironmentFailed: they have more tokens than `most_tokens` in all.
    """
    tokens = sum(len(tokens_of(turn)) for sequence in result.sequences for turn in sequence.turns)
    if most_tokens is not None and tokens > most_tokens:
        raise EnvironmentFailed(
            f"expected a rollout of at most {most_tokens} tokens in all, {BRANCHES} times max_length, got {tokens} in "
            f"{len(result.sequences)} sequences: a call that continues no earlier one begins another: bound them by "
            f"max_calls or max_tokens of the environment, or raise max_length"
        )


def _name_of(env: DrivingEnvironment) -> str:
    """Return the name of an environment: of an `AgentEnv`, that of its agent."""
    named: Any = getattr(env, "agent", env)
    return str(getattr(named, "__qualname__", None) or getattr(named, "command", None) or type(named).__qualname__)
