"""EvaluatedSteps: the optimizer steps of a run that are evaluated, as its sink needs them.

The sink waits for their evaluations, records the best checkpoint, and keeps that one, and those with an evaluation to
come. Knows no trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import anyio

from ..._pipeline.accounting.evaluations import STEP
from ..._pipeline.accounting.telemetry import get_logger
from ..._pipeline.graph.context import current
from ..sampling.evaluation import Evaluation
from .best_checkpoint import best_checkpoint, link_best, record_evaluation, rewind_best

log = get_logger("penstock.evaluation")


class EvaluatedSteps(NamedTuple):
    """The steps that `evaluation` evaluates, and the best checkpoint in `folder`; either may be None, for none."""

    evaluation: Evaluation | None
    folder: Path | None

    def due(self, step: int) -> bool:
        """Return whether the weights of `step` are evaluated."""
        return self.evaluation is not None and self.evaluation.due(step)

    async def finished(self, step: int) -> bool:
        """Wait for the evaluation of `step`, if it is due; return whether it is done.

        It is awaited before the first step, because a worker that starts late would evaluate newer weights, and after
        the last one, because sources run on to evaluate it.
        """
        if self.evaluation is None or not self.due(step):
            return False
        evaluations = current().metrics.evaluations
        timeout_s = 2 * self.evaluation.timeout_s  # a worker may be evaluating an earlier step
        with anyio.move_on_after(timeout_s) as timeout:
            await evaluations.finished(step)
        if timeout.cancelled_caught:
            log.warning("evaluation_timeout", step=step, waited_s=timeout_s)
        return evaluations.completed == step

    def record(self, metrics: Mapping[str, float]) -> None:
        """Record the evaluation in `metrics`, if there is one, and link its checkpoint if it is the best. Blocks."""
        if STEP in metrics and self.evaluation is not None and self.folder is not None:
            best = self.evaluation.best_metric
            record_evaluation(self.folder, best, int(metrics[STEP]), metrics.get(best))

    def is_recorded(self, step: int) -> bool:
        """Return whether the evaluation of `step` is recorded. Blocks."""
        best = None if self.folder is None else best_checkpoint(self.folder)
        return best is not None and best.evaluated >= step

    def spares(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is the best, or may become it. Blocks."""
        if self.evaluation is None or self.folder is None:
            return False
        best = best_checkpoint(self.folder)
        return (best is not None and step == best.step) or (self.due(step) and not self.is_recorded(step))

    def resume_at(self, step: int) -> None:
        """Forget evaluations of later steps than `step`, and link the best checkpoint. Blocks."""
        if self.evaluation is not None and self.folder is not None:
            rewind_best(self.folder, step)
            link_best(self.folder)

    def link_best(self) -> None:
        """Link the best checkpoint: its name changes if its step is saved again. Blocks."""
        if self.evaluation is not None and self.folder is not None:
            link_best(self.folder)
