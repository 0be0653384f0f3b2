"""The optimizer that a recipe makes, its schedule, and the continuation of both in a resumed run.

A checkpoint has the state of the optimizer, and the hyper-parameters that its recipe gave. A resumed run restores the
state; a hyper-parameter that differs in its own recipe has the new value. The schedule is made again and advanced to
the step of the checkpoint: it is a function of the number of steps. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..._pipeline.accounting.telemetry import get_logger
from ..models.torch_sharding import is_sharded, part_of
from .optimizers import OptimizerRecipe, ScheduleRecipe

log = get_logger("penstock.torch_trainer")

RATE, FIRST_RATE = "lr", "initial_lr"
"""Keys of a parameter group that a schedule sets."""


class GivenOptimizer:
    """An optimizer and its schedule, as their recipes give them.

    Raises:
        Exception: raised by a recipe.
    """

    def __init__(
        self, recipe: OptimizerRecipe, parameters: Sequence[torch.nn.Parameter], schedule: ScheduleRecipe | None
    ) -> None:
        self.optimizer = recipe(parameters)
        """The optimizer; it also has the state."""
        self.given = [_plain(group) for group in self.optimizer.param_groups]
        """The hyper-parameters of each parameter group, before the schedule changes any."""
        self.name = type(self.optimizer).__name__
        """The class of the optimizer: the meaning of the state depends on it."""
        self.parameters: list[torch.Tensor] = [
            each for group in self.optimizer.param_groups for each in group["params"]
        ]
        """The parameters in the order of its state."""
        self._recipe = schedule
        self._schedule = self._made_schedule()

    @property
    def rate(self) -> float:
        """Return the learning rate of the next step, that of the first parameter group."""
        return float(self.optimizer.param_groups[0][RATE])

    def advance(self) -> None:
        """Advance the schedule by one step."""
        if self._schedule is not None:
            self._schedule.step()

    def state(self) -> dict[str, Any]:
        """Return the state without the moments."""
        state: dict[str, Any] = self.optimizer.state_dict()
        rest = {
            index: {key: value for key, value in of_one.items() if not self._is_moment(value, index)}
            for index, of_one in state["state"].items()
        }
        return state | {"state": rest}

    def moments(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return the tensors of the state with the shape of their parameter, by its number among them and their key."""
        return {
            (index, key): value
            for index, of_one in self.optimizer.state_dict()["state"].items()
            for key, value in of_one.items()
            if self._is_moment(value, index)
        }

    def _is_moment(self, value: Any, index: int) -> bool:
        return is_sharded(value) or _has_shape(value, self.parameters[index])

    def moment(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return the moment `key` of `parameter`."""
        found: torch.Tensor = self.optimizer.state[parameter][key]
        return found

    def resume(
        self,
        state: dict[str, Any],
        moments: Mapping[str, torch.Tensor],
        given: Sequence[Mapping[str, Any]] | None,
        steps: int,
    ) -> None:
        """Restore `state`, apply the hyper-parameters of the recipes, and advance the schedule to step `steps`.

        Args:
            state: that `state()` returned; of older checkpoints with the moments.
            moments: those of `moments()`, whole, by `moment_name`; each rank takes its part of one after the other.
            given: the hyper-parameters of its recipe; None if they are unknown, and then those in `state` are kept.
            steps: optimizer steps that were done.

        Raises:
            ValueError: the state belongs to other parameter groups.
        """
        before = self.given if given is None else given
        self.optimizer.load_state_dict(state | {"state": self._with(moments, state["state"])})
        for index, (group, now) in enumerate(zip(self.optimizer.param_groups, self.given, strict=True)):
            _apply(group, before[index], now, index)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 (else torch warns of a schedule that is ahead)
        self._schedule = self._made_schedule()
        for _ in range(steps):
            self.advance()

    def _with(self, moments: Mapping[str, torch.Tensor], state: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
        """Return `state` with its own moments and those given, this rank's part of each."""
        parts = {
            index: {key: self._part(value, index) for key, value in of_one.items()} for index, of_one in state.items()
        }
        for name in moments:
            index, key = name.split(".", 1)
            parts[int(index)][key] = self._part(moments[name], int(index))
        return parts

    def _part(self, value: Any, index: int) -> Any:
        """Return this rank's part of a moment, in memory of its own; another value as it is."""
        parameter = self.parameters[index]
        if not _has_shape(value, parameter):
            return value
        return part_of(value, parameter) if is_sharded(parameter) else value.to(parameter.device, copy=True)

    def _made_schedule(self) -> LRScheduler | None:
        """Return a schedule that begins with the next step; an earlier one is forgotten."""
        if self._recipe is None:
            return None
        for group in self.optimizer.param_groups:
            group.pop(FIRST_RATE, None)
        return self._recipe(self.optimizer)


def moment_name(index: int, key: str) -> str:
    """Return the name of a moment in a checkpoint.

    >>> moment_name(3, "exp_avg")
    '3.exp_avg'
    """
    return f"{index}.{key}"


def _has_shape(value: Any, parameter: torch.Tensor) -> bool:
    return type(value) is torch.Tensor and value.ndim > 0 and value.shape == parameter.shape


def _apply(group: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], index: int) -> None:
    """Set the hyper-parameters of `group` that were given otherwise before; others may be state, of some optimizers."""
    for key, value in now.items():
        if key in before and before[key] != value:
            log.info("hyperparameter_changed", group=index, key=key, before=before[key], now=value)
            _set(group, key, value)
    _set(group, RATE, now[RATE])  # the schedule has changed it since


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a hyper-parameter; a tensor stays the same one, because kernels of the device read it."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a parameter group, as numbers, truth values, text and tuples of them."""
    values = {key: value.item() if _is_number(value) else value for key, value in group.items() if key != "params"}
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
