"""`AgentEnv`: an agent over the rows of a data set, as a driving environment; and `AgentCommand`, a program as agent.

Knows no pipeline. The rows have the order of a `PromptDataset`, and reach reward functions as those of prompts do.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec

from ..._pipeline.errors import InvalidConfig
from ..._schemas.numbers import normalize_counts
from ..contracts.prompts import Prompt, identity_of
from ..data.mixture import MixedPrompts, Mixture
from ..data.prompt_dataset import PromptDataset, PromptSet
from .agent_client import AgentClient, DrivingEnvironment


@dataclass(frozen=True)
class AgentCommand:
    """A program as the agent of an `AgentEnv`: it reads the row as JSON from its standard input.

    It finds OPENAI_BASE_URL, OPENAI_API_KEY and the others of `AgentClient.env` in its environment, and a folder of its
    own for temporary files, TMPDIR. Its reward is that of `POST $OPENAI_BASE_URL/reward`, or of a later stage. If it
    ends with another status than 0, its rollout fails.
    """

    command: Sequence[str | Path]
    """Program and arguments; no shell."""
    folder: str | Path | None = None
    """Working directory; by default that of the worker."""

    def __post_init__(self) -> None:
        """Check the command.

        Raises:
            InvalidConfig: it is empty, or a text.
        """
        if not self.command or isinstance(self.command, str | Path):
            raise InvalidConfig(f"AgentCommand.command: expected a program and its arguments, got {self.command!r}")

    async def __call__(self, row: dict[str, Any], client: AgentClient) -> None:
        """Run the program."""
        await client.run(self.command, stdin=msgspec.json.encode(row).decode(), folder=self.folder)


@dataclass(frozen=True)
class AgentEnv:
    """An agent over the rows of a data set; the `make_env` of a source, like the data set alone.

    Raises:
        InvalidConfig: a field is of another kind, or a bound is no count.
    """

    agent: Callable[..., Any]
    """Does one rollout, given the row and an `AgentClient`, and returns a reward or an `Outcome`: a coroutine function;
    a function of a module, which may block, and runs in a process of its own; or an `AgentCommand`. A function with
    `asynccontextmanager`, without arguments, is entered once in each worker, and yields the coroutine function."""
    tasks: PromptDataset | Mixture
    """The rows."""
    max_calls: int | None = None
    """Bound on the calls of a rollout."""
    max_tokens: int | None = None
    """Bound on the tokens that are sampled for a rollout."""
    scored: bool = True
    """False if a later stage gives the reward, such as the functions of a RewardBridge."""

    def __post_init__(self) -> None:
        """Check the fields."""
        normalize_counts(self, "max_calls", "max_tokens")
        if not callable(self.agent):
            raise InvalidConfig(f"AgentEnv.agent: expected a function of a row and a client, got {self.agent!r}")
        if not isinstance(self.tasks, PromptDataset | Mixture):
            raise InvalidConfig(f"AgentEnv.tasks: expected a PromptDataset or a Mixture, got {self.tasks!r}")

    @property
    def tokenizer(self) -> Any:
        """Return the tokenizer of the data set's chat format; None without one."""
        return self.tasks.tokenizer

    def identity(self) -> dict[str, Any] | None:
        """Return the identity of the rows; the agent may change."""
        return identity_of(self.tasks)

    def __call__(self) -> DrivingEnvironment:
        """Open the rows. Raises the errors of opening them."""
        rows = self.tasks()
        if inspect.isasyncgenfunction(inspect.unwrap(self.agent)):
            return _OpenedAgent(self, rows)
        return _AsyncAgent(self, rows) if _is_async(self.agent) else _BlockingAgent(self, rows)


def _is_async(agent: Any) -> bool:
    return inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None))  # noqa: B004 (is it async?)


class _Agent:
    """An `AgentEnv` with its rows open."""

    def __init__(self, env: AgentEnv, rows: PromptSet | MixedPrompts) -> None:
        self.agent = env.agent
        self._rows = rows
        self.scored: bool = env.scored
        self.max_calls: int | None = env.max_calls
        self.max_tokens: int | None = env.max_tokens

    def __len__(self) -> int:
        """Return the number of rows, if the data set has one."""
        return len(self._rows)  # type: ignore[arg-type]

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number`, for the facts about it."""
        return self._rows.prompt(number)

    def row(self, number: int) -> dict[str, Any]:
        """Return the row of a prompt, for each of its rollouts. Blocks."""
        return self._rows.row_of(number)


class _AsyncAgent(_Agent):
    async def drive(self, task: int, client: AgentClient) -> Any:
        """Do a rollout on the event loop."""
        return await self.agent(await anyio.to_thread.run_sync(self.row, task), client)


class _OpenedAgent(_AsyncAgent):
    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Enter what yields the agent."""
        async with self.agent() as self.agent:
            yield


class _BlockingAgent(_Agent):
    def drive(self, task: int, client: Any) -> Any:
        """Do a rollout in this process."""
        return self.agent(self.row(task), client)
