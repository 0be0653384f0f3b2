"""The benchmark of the memory of a step, at a size that takes no time."""

from __future__ import annotations

import argparse

import pytest
from benchmarks import step_memory
from rich.console import Console


def measured(micro_batch_tokens: int) -> step_memory.Measured:
    options = argparse.Namespace(width=128, layers=1, sequences=8, completion=6, steps=1, threads=1)
    return step_memory.measure(options, "float32", 50, micro_batch_tokens)


@pytest.mark.usefixtures("one_thread")
def test_micro_batches_are_measured_on_the_same_step() -> None:
    whole, parts = measured(0), measured(16)

    assert parts.loss == pytest.approx(whole.loss, rel=1e-4)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert whole.seconds > 0
    step_memory.show({("float32", 50, 0): [whole], ("float32", 50, 16): [parts]}, Console(quiet=True))
