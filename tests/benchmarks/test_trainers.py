"""The benchmarks beside TRL's trainer, and of the gradients of the head, at a size that takes no time."""

from __future__ import annotations

import io

import pytest
import torch
from benchmarks import head_backward, trainers
from rich.console import Console

from penstock.torch import Attention

MEASURED = trainers.Measured(step_s=4.0, step_cpu_s=2.0, training_s=2.0, training_cpu_s=1.0, grown_mb=100.0)


def test_ratios_are_to_every_measured_trainer_of_trl() -> None:
    found = {(64, name): [MEASURED] for name in trainers.CONTESTANTS}
    found[64, "TRL, as on CUDA"] = [trainers.Measured(*(2 * number for number in MEASURED))]

    console = Console(width=120, record=True, file=io.StringIO())
    trainers.show(found, console)

    tables = console.export_text()
    assert "ratios to TRL, float32" in tables
    of_cuda = tables.partition("ratios to TRL, as on CUDA")[2].splitlines()
    assert next(line for line in of_cuda if "penstock, 64" in line).count("0.50") == len(MEASURED)


@pytest.mark.usefixtures("one_thread")
def test_the_model_returns_logits_or_passes_its_head() -> None:
    model, tokens = head_backward.make_model(), torch.tensor([[3, 10, 4, 12]])
    attend = Attention.causal(torch.ones_like(tokens, dtype=torch.bool))

    logits = model(tokens, positions=torch.arange(4)[None], attend=attend)
    read = model(tokens, positions=torch.arange(4)[None], attend=attend, read=lambda hidden, weight: hidden @ weight.T)

    assert logits.shape == (1, 4, head_backward.VOCABULARY)
    torch.testing.assert_close(read, logits)


def test_tokens_beyond_those_of_the_example_are_a_sign_that_no_answer_has() -> None:
    assert head_backward.Tokenizer().decode([3, 10, 4, 500]) == "3+4="
