"""The benchmark of a training step, at a size that takes no time."""

from __future__ import annotations

import argparse

import pytest
import torch
from benchmarks import training
from benchmarks.decoder import Decoder, Size
from rich.console import Console

SIZE = Size(vocabulary=32, layers=1, width=16, heads=2, longest=8)


def test_the_roofline_counts_every_matrix_of_the_model() -> None:
    assert sorted(training.products(Decoder(SIZE))) == [(16, 16), (16, 32), (16, 48), (16, 64), (64, 16)]


def test_a_batch_holds_whole_groups_and_trains_all_but_first_tokens() -> None:
    batch = training.make_batch(SIZE, 128)

    assert batch.tokens.size == 128
    assert batch.loss_tokens == 128 - 16


@pytest.mark.usefixtures("one_thread")
def test_steps_are_counted_beside_what_the_products_take() -> None:
    options = argparse.Namespace(device="cpu", shape=None, lora=0, micro_batch_tokens=64, seconds=0.05)

    result = training.steps(training.Way("float32", torch.float32, None), SIZE, training.make_batch(SIZE, 128), options)

    assert 0 < result.tokens_per_s < result.roofline
    assert all(result.seconds[part] > 0 for part in training.PARTS)
    training.show([result], Console(quiet=True))
