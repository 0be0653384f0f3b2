"""Print the accuracy of a policy during training, and stop the training when it is high enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from penstock.accounting import Metrics

from .exam import final_exam, quiz
from .model import Transformer

__all__ = ["printed_curve"]


@contextmanager
def printed_curve(name: str, model: Transformer, target: float) -> Iterator[Metrics]:
    """Print every `accuracy` in the metrics within the body; cancel the body once it reaches `target`."""
    print(f"{name}\n   0: {quiz(model):.1%}", flush=True)
    with anyio.CancelScope() as scope:

        def note(metrics: dict[str, float], step: int) -> None:
            if "accuracy" in metrics:
                print(f"{step:>4}: {metrics['accuracy']:.1%}", flush=True)
                if metrics["accuracy"] >= target:
                    scope.cancel()

        yield Metrics(note)
    print(f"final exam: {final_exam(model):.1%}\n", flush=True)
