"""`VerifiersEnvironment`: a taskset of verifiers as a driving environment. Extra `verifiers`.

Its harness asks the endpoint of the rollout, and its trace has the reward. Knows no pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import anyio.to_thread

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.extras import extra
from .agent_client import AgentClient, DrivingEnvironment, Outcome

UNSET = "PENSTOCK_KEY_IN_URL"
"""A variable without a value: the URL of a rollout has its key."""


class EpisodeFailed(Exception):
    """An episode of verifiers ended by an error."""


@dataclass(frozen=True)
class VerifiersEnvironment:
    """A taskset of verifiers, one rollout for each episode; the `make_env` of a source with a chat format.

    The prompts are the tasks in their order, again from the first after the last. Reward, its parts by name, and
    metrics are those of the trace. An episode that ends by an error fails its rollout.

        VerifiersEnvironment("gsm8k-v1", {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}})

    Raises:
        InvalidConfig: there is no taskset; or, when it is called, verifiers refuses the configuration.
        MissingExtra: when it is called: the package `verifiers` is not installed.
    """

    taskset: str
    """Its id: a package of verifiers' or a module."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration of the environment, as in the section `env` of verifiers; `taskset` has further fields."""
    client: Mapping[str, Any] = field(default_factory=dict)
    """Fields of verifiers' client: by default one of chat completions; `{"type": "train", …}` for tokens, which its
    renderer writes."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.taskset, str) or not self.taskset:
            raise InvalidConfig(f"VerifiersEnvironment.taskset: expected the id of a taskset, got {self.taskset!r}")
        for name in ("config", "client"):
            if not isinstance(getattr(self, name), Mapping):
                raise InvalidConfig(
                    f"VerifiersEnvironment.{name}: expected a mapping, got {type(getattr(self, name)).__name__}"
                )

    def __call__(self) -> DrivingEnvironment:
        """Open the taskset. Blocks."""
        with extra("verifiers", "VerifiersEnvironment"):
            verifiers: Any = import_module("verifiers.v1")
        loaders: Any = import_module("verifiers.v1.utils.loaders")
        try:
            config = loaders.resolve_env_config(
                {**self.config, "taskset": {**self.config.get("taskset", {}), "id": self.taskset}}
            )
            env = loaders.load_environment(config)
        except (ValueError, TypeError, AttributeError, ModuleNotFoundError) as error:
            raise InvalidConfig(f"VerifiersEnvironment: {error}") from error
        return _Episodes(verifiers, env, dict(self.client))


class _Episodes:
    """The episodes of an environment of verifiers."""

    def __init__(self, verifiers: Any, env: Any, client: dict[str, Any]) -> None:
        self._verifiers = verifiers
        self._env = env
        kind = verifiers.TrainClientConfig if client.get("type") == "train" else verifiers.EvalClientConfig
        try:
            self._client = kind.model_validate({**client, "base_url": "", "api_key_var": UNSET})
        except ValueError as error:
            raise InvalidConfig(f"VerifiersEnvironment.client: {error}") from error
        self._tasks: list[Any] = []
        self._rest: Iterator[Any] = iter(env.taskset)
        """The tasks that were not read yet."""
        if env.taskset.bounded:
            self._tasks = list(self._rest)
            if not self._tasks:
                raise InvalidConfig("VerifiersEnvironment.taskset: expected at least one task, got none")

    def __len__(self) -> int:
        """Return the number of tasks.

        Raises:
            TypeError: they do not end.
        """
        if not self._env.taskset.bounded:
            raise TypeError("the tasks do not end")
        return len(self._tasks)

    async def drive(self, task: int, client: AgentClient) -> Outcome:
        """Do an episode."""
        context = self._verifiers.ModelContext(
            model="policy", client=self._client.model_copy(update={"base_url": client.base_url})
        )
        env = copy.copy(self._env)  # what serves an episode is its own, and ends with it: clients, servers of tools
        async with env.serving():
            episode = await env.run_episode(await anyio.to_thread.run_sync(self._task, task), context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeFailed(
                "; ".join(f"{error.type}: {error.message}" for error in errors) or "it was not completed"
            )
        if len(episode.traces) != 1:
            raise EpisodeFailed(f"expected an environment of one agent, got {len(episode.traces)} traces")
        return outcome_of(episode.traces[0])

    def _task(self, number: int) -> Any:
        """Return the task of a prompt. Blocks."""
        with suppress(StopIteration):
            while len(self._tasks) <= number:
                self._tasks.append(next(self._rest))
        return self._tasks[number % len(self._tasks)]


def outcome_of(trace: Any) -> Outcome:
    """Return the reward of a trace, its parts and its metrics."""
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Outcome(reward=float(trace.reward), parts=parts, metrics=metrics)
