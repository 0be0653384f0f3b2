"""TrainedModel: a model with its optimizer, updates by the gradient of a whole batch, and its part of a checkpoint.

A policy and a critic are one each. Knows no loss: the caller gives the value of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._pipeline.errors import InvalidConfig
from ..contracts.autocast import check_autocast
from ..losses.metrics import Mean, Metric, check_used, merge
from ..losses.terms import LossValue
from ..models.gathering import gathered
from ..models.micro_batches import MicroBatch
from ..models.torch_sharding import Trainable, accumulating, bare, device_of
from ..models.torch_weights_file import stored_weights, write_weights
from .loss_scale import LossScale
from .optimizers import OptimizerRecipe, ScheduleRecipe
from .torch_optimizer import GivenOptimizer
from .torch_ranks import Ranks
from .torch_saved_tensors import Gather, SavedTensors

Parts: TypeAlias = Sequence[MicroBatch | None]
"""The micro-batches of this rank; None where only other ranks have one."""

LossOfPart: TypeAlias = Callable[[MicroBatch | None], LossValue]

Around: TypeAlias = Callable[[MicroBatch | None], AbstractContextManager[object]]


class TrainedModel:
    """A model that trains; see the module.

    Args:
        name: of the argument that it was given as, for errors.
        model: trained in place.
        optimizer: makes the optimizer of its parameters.
        schedule: makes the schedule of the learning rate; None for a constant rate.
        max_grad_norm: bound on the norm of the gradient; infinite for none.
        autocast: the dtype of the model's safe operations.
        ranks: those that train it together; None for a single process.
        judges: true for a critic: its tensors have addresses of their own.

    Raises:
        InvalidConfig: parameters that train are in bfloat16 or float16, or another `autocast`.
    """

    def __init__(
        self,
        name: str,
        model: Trainable,
        optimizer: OptimizerRecipe,
        schedule: ScheduleRecipe | None,
        *,
        max_grad_norm: float,
        autocast: torch.dtype | None,
        ranks: Ranks | None,
        judges: bool = False,
    ) -> None:
        _check_precision(name, autocast, model)
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """Those that train."""
        self.optimizer = GivenOptimizer(optimizer, self.parameters, schedule)
        self.tensors = SavedTensors(bare(model), self.optimizer, judges=judges)
        self.loss_scale = LossScale(autocast, self.device)
        self._name = name
        self._max_grad_norm = max_grad_norm
        self._ranks = ranks

    @property
    def device(self) -> torch.device:
        """Return the device that trains it."""
        return device_of(self.parameters[0])

    def update(
        self, parts: Parts, loss_of: LossOfPart, lap: Callable[[str], None], step: int, around: Around = nullcontext
    ) -> dict[str, Metric]:
        """Do one optimizer update on the whole batch; return its metrics.

        Args:
            parts: the micro-batches; all ranks have as many.
            loss_of: returns the loss of one as a share of the global batch's; 0 times its tensors for None.
            lap: called with `forward` and `backward` after each pass, and with `optimizer` at the end.
            step: number of the step, for the error.
            around: entered around both passes of one.

        Raises:
            FloatingPointError: the gradient is not finite; the update was not applied.
        """
        metrics, norm = self._gradient(parts, loss_of, lap, around)
        while not norm.isfinite():
            if not self.loss_scale.lower():
                found = {name: metric.value() for name, metric in metrics.items()}
                raise FloatingPointError(
                    f"{self._name}: expected a finite gradient in step {step}, got norm {norm.item()} with {found}"
                )
            metrics, norm = self._gradient(parts, loss_of, lap, around)
        self.loss_scale.step(self.optimizer.optimizer)
        lap("optimizer")
        return metrics | {"grad_norm": Mean(norm)}

    def _gradient(
        self, parts: Parts, loss_of: LossOfPart, lap: Callable[[str], None], around: Around
    ) -> tuple[dict[str, Metric], Tensor]:
        """Compute the gradient of the whole batch, clipped; return metrics, and its norm before that."""
        self.optimizer.optimizer.zero_grad(set_to_none=True)
        metrics: dict[str, Metric] = {}
        count = 1 if self._ranks is None else self._ranks.count
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            with accumulating(self.model, last=not left), around(part):
                value, reported = loss_of(part)
                lap("forward")
                # ranks average their gradients, and the sum is needed
                torch.autograd.backward(self.loss_scale.scaled(count * value))
                lap("backward")
            merge(metrics, reported)
        if self._ranks is not None:
            metrics = self._ranks.merged(metrics)
        check_used(metrics)
        self.loss_scale.unscale(self.optimizer.optimizer)
        norm: Tensor = gathered(torch.nn.utils.clip_grad_norm_(self.parameters, self._max_grad_norm))
        return metrics, norm

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def write(self, weights: Path, moments: Path, gather: Gather) -> None:
        """Write the weights of the model and the moments of its optimizer to these files."""
        write_weights(self.tensors.weights(gather), weights)
        write_weights(self.tensors.moments(gather), moments)

    def state(self) -> dict[str, Any]:
        """Return the rest of the state of optimizer and loss scale, for a checkpoint."""
        return {
            "optimizer": self.optimizer.state(),
            "given": self.optimizer.given,
            "loss_scale": self.loss_scale.state(),
        }

    def resume(self, state: Mapping[str, Any], moments: Path, steps: int) -> None:
        """Restore the state that `state` returned, and the moments of a file, after `steps` of the schedule."""
        stored = stored_weights(moments) if moments.is_file() else {}  # {} in older checkpoints
        self.optimizer.resume(state["optimizer"], stored, state.get("given"), steps)
        self.loss_scale.load(state.get("loss_scale", {}))  # absent in older checkpoints


def _check_precision(name: str, autocast: torch.dtype | None, model: Trainable) -> None:
    """Check that small updates are not lost: one below 2**-9 of a parameter leaves it as it is in bfloat16."""
    check_autocast("TorchTrainer", autocast)
    allowed = {torch.float32, torch.float64} if autocast is None else {torch.float32}
    found = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} - allowed
    if found:
        raise InvalidConfig(
            f"TorchTrainer.{name}: expected parameters that train in float32, in which small updates are not lost, got "
            f"{', '.join(sorted(map(str, found)))}: make the model without a dtype, or with model.float(), and give "
            f"TorchTrainer(autocast=torch.bfloat16) to compute in bfloat16"
        )
