"""Entropy, its bonus and the tokens of the highest one beside the peers' code. `make test-oracles` runs this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.oracles_real import of_trl, of_verl
from tests.oracles_real.batches import BATCHES, Batch, agree, chosen
from tests.oracles_real.release import Release
from tests.oracles_real.rows import PPO
from tests.stages.losses.scoring import scored, slope
from torch import Tensor

from penstock.losses import AdaptiveEntropy, Entropy, Scored, TopEntropyMask

VOCABULARY = 11

FUNCTIONS: list[tuple[Release, str, str]] = [
    (of_verl.VERL, "verl.utils.torch_functional", "entropy_from_logits"),
    (of_verl.VERL, "verl.utils.torch_functional", "entropy_from_logits_with_chunking"),
    (of_trl.TRL, "trl.trainer.utils", "entropy_from_logits"),
]


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("release", "module", "name"), FUNCTIONS, ids=[f"{each[0]}: {each[2]}" for each in FUNCTIONS])
def test_an_entropy_has_the_value_and_the_gradient_of_the_peer(
    release: Release, module: str, name: str, scale: float
) -> None:
    random = torch.Generator().manual_seed(3)
    logits = (scale * torch.randn(9, VOCABULARY, generator=random, dtype=torch.float64)).requires_grad_()
    given = scored(torch.zeros(9, dtype=torch.float64), torch.ones(9), predicted=torch.log_softmax(logits, -1))

    ours = Entropy().per_token(given).values
    theirs = release.get(module, name)(logits)

    close = 1e-6 if theirs.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close, check_dtype=False)
    torch.testing.assert_close(slope(ours.sum(), logits), slope(theirs.sum(), logits), rtol=close, atol=close)


def entropies() -> Tensor:
    """Return [B, L] entropies, no two of them equal, and all exact in the float32 of TRL's quantile."""
    shape = BATCHES["apart"].mask.shape
    return torch.randperm(shape.numel(), generator=torch.Generator().manual_seed(4)).double().view(shape) / 128


def with_entropies(batch: Batch) -> Callable[[Scored], Scored]:
    """Return a function that puts them into the argument of a loss."""
    return lambda given: replace(given, entropy=entropies()[batch.mask])


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_tokens_of_the_highest_entropy_are_those_of_trl(batch: str, share: float) -> None:
    ours = PPO * TopEntropyMask(share)
    theirs = of_trl.loss_of("dapo", entropies=entropies(), epsilon_high=0.3, top_entropy_quantile=share)
    given = BATCHES[batch]

    agree(ours, theirs, given, prepare=lambda each: chosen(ours)(with_entropies(given)(each)))


@pytest.mark.parametrize("batch", BATCHES)
def test_an_entropy_bonus_is_that_of_trl(batch: str) -> None:
    given = BATCHES[batch]
    theirs = of_trl.loss_of(
        "dapo", entropies=entropies(), epsilon_high=0.3, _entropy_bonus_enabled=True, entropy_coef=0.02
    )

    agree(PPO - 0.02 * Entropy(), theirs, given, prepare=with_entropies(given))


def test_an_adaptive_bonus_follows_that_of_trl_step_by_step() -> None:
    batch = BATCHES["apart"]
    made: Any = of_trl.trainer(
        loss_type="dapo",
        epsilon_high=0.3,
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=True,
        _entropy_window_stats=None,
        _last_world_entropy=float("inf"),
        entropy_target=0.45,
        entropy_coef=0.05,
        entropy_coef_delta=0.02,
        entropy_coef_max=0.08,
    )
    adaptive = AdaptiveEntropy(0.45, 0.05, delta=0.02, most=0.08)

    for factor in (0.2, 0.3, 0.4, 3.0, 2.0, 0.1, 3.0, 3.0, 3.0, 3.0, 3.0):
        of_tokens = factor * entropies()
        theirs = of_trl.value_of(made, batch, entropies=of_tokens)
        value = (PPO + adaptive)(replace(batch.packed(batch.new[batch.mask]), entropy=of_tokens[batch.mask]))
        adaptive.adapt({name: metric.value() for name, metric in value.metrics.items()}, batch.sequences)

        torch.testing.assert_close(value.loss, theirs)
        assert adaptive.weight == pytest.approx(made.entropy_coef)
