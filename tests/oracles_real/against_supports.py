"""Log-probabilities over the support of a draw beside slime's own code. `make test-oracles` runs this file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracles_real.of_slime import PPO, slime
from tests.stages.losses.scoring import slope

from penstock._stages.losses.distributions import Distributions

TOKENS, VOCABULARY, WIDTH, HIDDEN = 12, 37, 5, 8


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_log_probabilities_over_a_support_have_the_values_and_the_gradients_of_slime(scale: float) -> None:
    random = torch.Generator().manual_seed(3)
    logits = (scale * torch.randn(TOKENS, VOCABULARY, generator=random)).requires_grad_()
    support = logits.topk(WIDTH).indices.to(torch.int32)
    support[::3, 2:], support[5] = -1, -1  # smaller ones, and one of the whole vocabulary
    tokens = torch.where(support[:, 1] >= 0, support[:, 1], 7).long()
    keep = torch.zeros(TOKENS, VOCABULARY + 1, dtype=torch.bool).scatter_(1, support.long() % (VOCABULARY + 1), value=1)
    keep = keep[:, :VOCABULARY] | (support < 0).all(1, keepdim=True)
    weights = torch.randn(TOKENS, generator=random)

    ours = Distributions(logits, support=support).logprobs_of(tokens)
    apply: Any = slime(PPO, "_VocabParallelLogProbEntropy").apply
    theirs, _ = apply(logits, tokens, keep, None, False, False)

    torch.testing.assert_close(ours, theirs.squeeze(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        slope((ours * weights).sum(), logits), slope((theirs.squeeze(1) * weights).sum(), logits)
    )
