"""Reward functions as users have them from TRL and verl, called with the arguments that those frameworks pass.

A function without `**kwargs` is given only the arguments that it names. The arguments are those in the sources of TRL
1.16 (`GRPOTrainer._calculate_rewards`) and verl 0.9.1 (`NaiveRewardManager.run_single`).
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any, Literal

from ..._pipeline.errors import MissingColumn
from ..._schemas.config import nearest
from .ground_truth import ground_truth
from .returned_values import listed
from .reward_functions import RewardFunction, Verdict, name_of
from .reward_input import RewardInput


def trl_reward(
    function: Callable[..., Any],
    weight: float = 1.0,
    name: str = "",
    *,
    concurrency: int = 1,
    reward_timeout_s: float = 30.0,
    on_failure: Literal["drop", "raise"] | float = "drop",
) -> RewardFunction:
    """Return a reward function of TRL, `f(prompts, completions, **columns) -> list[float]`, as a component.

    It is called with all completions of a group. `prompts` and `completions` are lists of messages if the prompt is a
    conversation, else of text; every column of the row is a list; `completion_ids`, `trainer_state` (with a
    `global_step`, the policy version), `log_metric` and `log_extra` are passed too. None, or NaN, for a completion
    leaves its reward as it is. It may be async. Options are those of `RewardFunction`; TRL makes one call at a time.

    >>> def longest(prompts, completions, **columns):
    ...     return [float(len(completion)) for completion in completions]
    >>> trl_reward(longest, weight=0.1).name
    'longest'
    """
    return RewardFunction(
        _TrlFunction(function),
        name=name,
        weight=weight,
        concurrency=concurrency,
        reward_timeout_s=reward_timeout_s,
        on_failure=on_failure,
        batched=True,
    )


def verl_reward(
    function: Callable[..., Any],
    weight: float = 1.0,
    name: str = "",
    *,
    concurrency: int = 16,
    reward_timeout_s: float = 30.0,
    on_failure: Literal["drop", "raise"] | float = "drop",
) -> RewardFunction:
    """Return verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` as a component.

    It is called for each completion, with its text. `data_source` and `extra_info` are columns of the row, and
    `ground_truth` is the one of the column `reward_model`, as in verl's files, or else the column `ground_truth` or
    `answer`. Of a dict that it returns, "score" is the value, and other numbers are metrics. It may be async.

    >>> def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    ...     return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
    >>> verl_reward(compute_score, name="exact").name
    'exact'
    """
    return RewardFunction(
        _VerlFunction(function),
        name=name,
        weight=weight,
        concurrency=concurrency,
        reward_timeout_s=reward_timeout_s,
        on_failure=on_failure,
    )


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A function that is called otherwise than our own."""

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """Return the name of the function."""
        return name_of(self.function)


# -- TRL ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TrlFunction(_Foreign):
    """Calls a function with a group, as TRL would."""

    def __call__(self, inputs: Sequence[RewardInput]) -> Sequence[Verdict] | Awaitable[Sequence[Verdict]]:
        metrics: dict[str, list[float]] = defaultdict(list)
        arguments = _trl_arguments(inputs) | {
            "log_metric": lambda name, value: metrics[name].append(float(value)),
            "log_extra": lambda _column, _values: None,  # columns of a table of completions: it is not kept
        }
        returned = self.function(**_accepted(self.function, arguments, inputs[0].row))
        return _awaited(returned, metrics) if inspect.isawaitable(returned) else _with_metrics(returned, metrics)


def _trl_arguments(inputs: Sequence[RewardInput]) -> dict[str, Any]:
    names = inputs[0].row.keys() - {"prompt", "completion"}
    columns = {name: [each.row[name] for each in inputs] for name in names}
    return columns | {
        "prompts": [each.prompt for each in inputs],
        "completions": [each.completion for each in inputs],
        "completion_ids": [each.trajectory.tokens[each.trajectory.prompt_length :].tolist() for each in inputs],
        "trainer_state": SimpleNamespace(
            global_step=max(int(each.trajectory.policy_versions.max(initial=0)) for each in inputs)
        ),
    }


async def _awaited(returned: Awaitable[Any], metrics: Mapping[str, list[float]]) -> Sequence[Verdict]:
    return _with_metrics(await returned, metrics)


def _with_metrics(returned: Any, metrics: Mapping[str, list[float]]) -> Sequence[Verdict]:
    """Return the values, the first one with the metrics that the function logged."""
    values: list[Any] = [None if isinstance(value, Real) and math.isnan(value) else value for value in listed(returned)]
    if metrics and values:
        values[0] = {"score": values[0]} | {name: sum(logged) / len(logged) for name, logged in metrics.items()}
    return values


# -- verl --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _VerlFunction(_Foreign):
    """Calls a function with a completion, as verl would."""

    def __call__(self, completion: RewardInput) -> Verdict | Awaitable[Verdict]:
        row = completion.row
        arguments = {
            "data_source": row.get("data_source", completion.meta.get("data_source", "")),
            "solution_str": completion.text,
            "extra_info": {
                **(row.get("extra_info") or {}),
                "num_turns": len(completion.turns),
                "rollout_reward_scores": {},
            },
            **ground_truth(row),
        }
        verdict: Verdict | Awaitable[Verdict] = self.function(**_accepted(self.function, arguments, row))
        return verdict


# -- both --------------------------------------------------------------------------------------------------------------


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `function` takes.

    Raises:
        MissingColumn: it requires another one.
    """
    parameters = inspect.signature(function).parameters.values()
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in _NAMED]
    if missing := [name for name in needed if name not in arguments]:
        raise MissingColumn(
            f"{name_of(function)}: expected the data to have a column {missing[0]!r}, which the function takes, got "
            f"rows with {sorted(row)}{nearest(missing[0], row)}. Rename the column or the parameter"
        )
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in {each.name for each in parameters}}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
