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
from ..models.torch_sharding import gathered, spread_optimizer
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
        self._parameters = parameters
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
        """Return the whole state of the optimizer; a collective operation of ranks that share a model."""
        whole: dict[str, Any] = gathered(self.optimizer.state_dict())
        return whole

    def resume(self, state: dict[str, Any], given: Sequence[Mapping[str, Any]] | None, steps: int) -> None:
        """Restore `state`, apply the hyper-parameters of the recipes, and advance the schedule to step `steps`.

        Args:
            state: that `state()` returned.
            given: the hyper-parameters of its recipe; None if they are unknown, and then those in `state` are kept.
            steps: optimizer steps that were done.

        Raises:
            ValueError: the state belongs to other parameter groups.
        """
        before = self.given if given is None else given
        self.optimizer.load_state_dict(spread_optimizer(state, self._parameters))
        for index, (group, now) in enumerate(zip(self.optimizer.param_groups, self.given, strict=True)):
            _apply(group, before[index], now, index)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 (else torch warns of a schedule that is ahead)
        self._schedule = self._made_schedule()
        for _ in range(steps):
            self.advance()

    def _made_schedule(self) -> LRScheduler | None:
        """Return a schedule that begins with the next step; an earlier one is forgotten."""
        if self._recipe is None:
            return None
        for group in self.optimizer.param_groups:
            group.pop(FIRST_RATE, None)
        return self._recipe(self.optimizer)


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
