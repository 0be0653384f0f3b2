"""`LearningSignal`: warns of steps in a row without a gradient from rewards, and names the constant part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.constant_steps import STEPS_IN_A_ROW, ConstantSteps
from ..._pipeline.accounting.telemetry import get_logger
from ..._schemas import TrainBatch

log = get_logger("penstock.sink_trainer")


class LearningSignal:
    """Looks at one batch after another."""

    def __init__(self) -> None:
        self.steps_without = 0
        """Batches in a row without a signal, up to the last one; emitted as `batch/steps_without_signal`."""
        self._learns = False
        """True once a batch had one."""

    def observe(self, batch: TrainBatch, step: int) -> ConstantSteps | None:
        """Look at the batch of step `step`, and warn if it is the last of too many.

        Return all batches so far, if none had a signal.
        """
        constant = constant_part(batch)
        self.steps_without = self.steps_without + 1 if constant else 0
        self._learns |= not constant
        if self.steps_without == STEPS_IN_A_ROW:
            log.warning("no_learning_signal", step=step, steps_in_a_row=self.steps_without, constant=constant)
        return None if self._learns else ConstantSteps(self.steps_without, constant)


def constant_part(batch: TrainBatch) -> str:
    """Return the constant part of `batch`, the reason that rewards give no gradient; empty if they give one.

    A batch without advantages, or with a teacher's candidates, has a loss of another kind.
    """
    if not batch.loss_mask.any():
        return "the loss mask: no token trains"
    if batch.advantages is None or batch.teacher_ids is not None or batch.advantages[batch.loss_mask].any():
        return ""
    if not _differs(batch.rewards):
        return f"rewards: each is {batch.rewards[0]:g}{_parts(batch)}"
    if not _differs(_within_groups(batch, batch.rewards)):
        return f"rewards within every group{_parts(batch)}"
    return "advantages: each is 0, although rewards differ within groups"


def _parts(batch: TrainBatch) -> str:
    """Return the reward parts that are constant within every group: ` (constant: score; not: length_bounty)`."""
    differ = {name: _differs(_within_groups(batch, part)) for name, part in batch.reward_parts.items()}
    named = {
        "constant": [name for name, differs in differ.items() if not differs],
        "not": [name for name, differs in differ.items() if differs],
    }
    listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in named.items() if names)
    return f" ({listed})" if listed else ""


def _within_groups(batch: TrainBatch, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return [S] the values less that of the first sequence of their group."""
    owners = batch.group_of_sequence()
    _, first = np.unique(owners, return_index=True)
    within: NDArray[np.float32] = values - values[first][owners]
    return within


def _differs(values: NDArray[np.float32]) -> bool:
    return not np.allclose(values, values[0])
