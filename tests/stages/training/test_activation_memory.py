"""The tokens of a micro-batch suit the device: a number for a CPU, and for a CUDA device what its memory holds."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from penstock._stages.training import activation_memory
from penstock._stages.training.activation_memory import bytes_of_a_token, fitting_tokens, suitable_tokens

GB = 10**9

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("free", "later", "of_a_token", "tokens"),
    [
        (80 * GB, 8 * GB, 1_000_000, 16_384),
        (80 * GB, 8 * GB, 4_000_000, 8192),
        (73 * GB, 19 * GB, 4_500_000, 8192),
        (73 * GB, 19 * GB, 6_500_000, 4096),
        (24 * GB, 8 * GB, 2_200_000, 4096),
        (24 * GB, 16 * GB, 2_200_000, 2048),
        (24 * GB, 20 * GB, 2_200_000, 1024),
        (80 * GB, 0, 0, 16_384),
    ],
)
def test_the_largest_micro_batch_is_taken_that_fits_beside_gradients_and_moments(
    free: int, later: int, of_a_token: float, tokens: int
) -> None:
    assert fitting_tokens(free, later, of_a_token) == tokens


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_bytes_of_a_token_contain_no_weights_and_no_cast_of_them(dtype: torch.dtype | None) -> None:
    layer = nn.Linear(64, 128, bias=False)

    def forward(tokens: int) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            found: Tensor = layer(torch.ones(tokens, 64)).exp()  # keeps the inputs, the weights, and its own result
        return found

    of_a_token = bytes_of_a_token(forward, 32)

    assert of_a_token == (64 * 4 + 128 * 4 if dtype is None else 64 * 2 + 128 * 2)


def test_the_trial_holds_nothing_when_it_has_ended() -> None:
    layers = [nn.Linear(64, 128)]
    watched = weakref.ref(layers[0].weight)

    bytes_of_a_token(lambda tokens: layers[0](torch.ones(tokens, 64)).exp(), 32)
    layers.clear()
    gc.collect()

    assert watched() is None


def test_a_cpu_computes_the_tokens_that_it_always_did_without_a_trial() -> None:
    def forward(_: int) -> Tensor:
        raise AssertionError("expected no call")

    assert suitable_tokens(CPU, [], forward, 100, has_moments=False) == 3072


@pytest.mark.parametrize(("has_moments", "tokens"), [(False, 8192), (True, 16_384)])
def test_moments_that_do_not_exist_yet_leave_less_for_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch, *, has_moments: bool, tokens: int
) -> None:
    layer = nn.Linear(1000, 1000)
    monkeypatch.setattr(activation_memory, "free_bytes", lambda _: 95_000_000)
    monkeypatch.setattr("torch.random.fork_rng", lambda _: nullcontext())

    found = suitable_tokens(
        CUDA, list(layer.parameters()), lambda count: layer(torch.ones(count, 1000)), 600, has_moments=has_moments
    )

    assert found == tokens
