"""Draws of tokens from scores, on a CPU and by noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock._stages.engines.torch_draw import CHUNK, InverseDraw, draw_by_noise

JUST_BELOW_1 = 1 - 2**-53


def tokens_of(scores: Tensor, uniform: list[float]) -> list[int]:
    rows = scores.expand(len(uniform), -1)
    chosen, _ = InverseDraw()(rows, torch.tensor(uniform, dtype=torch.float64))
    return chosen.tolist()


@pytest.mark.parametrize("vocabulary", [11, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("device", ["cpu", "others"])
def test_tokens_are_drawn_as_often_as_they_are_probable(vocabulary: int, device: str) -> None:
    """Chi-square with vocabulary - 1 degrees of freedom: five standard deviations are exceeded once in a million."""
    random, draws = torch.Generator().manual_seed(1), 50_000
    scores = torch.randn(1, vocabulary, generator=random)
    if device == "cpu":
        uniform = torch.rand(draws, dtype=torch.float64, generator=random)
        parts = [InverseDraw()(scores.expand(len(part), -1), part)[0] for part in torch.split(uniform, 10_000)]
    else:
        parts = [draw_by_noise(scores, torch.empty(1000, vocabulary).exponential_(generator=random)) for _ in range(50)]

    counts = torch.cat(parts).bincount(minlength=vocabulary)

    expected = scores[0].double().softmax(-1) * draws
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - (vocabulary - 1)) < 5 * (2 * (vocabulary - 1)) ** 0.5


def test_tokens_of_probability_zero_are_never_drawn_also_at_the_ends() -> None:
    scores = torch.full((1, 4 * CHUNK), -torch.inf)
    scores[0, [CHUNK + 3, 2 * CHUNK - 1, 3 * CHUNK]] = torch.tensor([0.0, 1.0, -20.0])

    drawn = tokens_of(scores, [0.0, 1e-300, 0.5, 0.99999, JUST_BELOW_1])

    assert drawn == [CHUNK + 3, CHUNK + 3, 2 * CHUNK - 1, 2 * CHUNK - 1, 3 * CHUNK]


def test_the_last_tokens_of_a_large_vocabulary_keep_their_probability() -> None:
    """A cumulative sum in float32 stops growing: after 1, a term of 3e-8 is lost, however many there are."""
    vocabulary, tail = 152_000, 3e-8
    scores = torch.full((1, vocabulary), torch.tensor(tail).log().item())
    scores[0, 0] = 0.0
    total = 1 + tail * (vocabulary - 1)

    drawn = tokens_of(scores, [(1 + tail * (place - 0.5)) / total for place in (1, 70_000, vocabulary - 1)])

    torch.testing.assert_close(torch.tensor(drawn), torch.tensor([1, 70_000, vocabulary - 1]), atol=2, rtol=0)


def test_every_token_is_reached_at_its_own_interval() -> None:
    scores = torch.log(torch.tensor([[0.25, 0.0, 0.5, 0.25]]))

    assert tokens_of(scores, [0.0, 0.2499, 0.2501, 0.7499, 0.7501, JUST_BELOW_1]) == [0, 0, 2, 2, 3, 3]


def test_the_normalizer_is_that_of_the_whole_distribution() -> None:
    scores = 5 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))

    _, normalizer = InverseDraw()(scores, torch.rand(3, dtype=torch.float64))

    torch.testing.assert_close(normalizer, scores.double().logsumexp(-1), atol=1e-6, rtol=0)


def test_memory_of_an_earlier_draw_leaves_nothing_behind() -> None:
    draw, uniform = InverseDraw(), torch.full((2,), JUST_BELOW_1, dtype=torch.float64)
    draw(torch.zeros(2, 200), uniform)

    tokens, normalizer = draw(torch.zeros(2, 150), uniform)

    assert tokens.tolist() == [149, 149]
    torch.testing.assert_close(normalizer.exp(), torch.full((2,), 150.0, dtype=torch.float64))
