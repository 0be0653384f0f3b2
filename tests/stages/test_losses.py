from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.schemas import InvalidRecord
from penstock.stages.losses import (
    AdvantageWeighted,
    Aggregation,
    Loss,
    PPOClip,
    Scored,
    aggregate,
    kl_k3,
    score_tokens,
)

LOSSES: list[Loss] = [
    AdvantageWeighted(),
    AdvantageWeighted(aggregation="seq-mean-token-mean"),
    PPOClip(),
    PPOClip(clip_high=0.4, aggregation="seq-mean-token-sum"),
    PPOClip(dual_clip=1.5),
]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=repr)


def scored(
    logprobs: Tensor, advantages: Tensor, *, behavior: Tensor | None = None, mask: Tensor | None = None
) -> Scored:
    kept = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask
    return Scored(logprobs, kept, advantages, behavior, int(kept.sum()), int(kept.any(dim=1).sum()))


def random(seed: int = 0, rows: int = 4, length: int = 6) -> Scored:
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(rows, length, generator=generator, dtype=torch.float64)

    return scored(-uniform(), uniform() - 0.5, behavior=-uniform(), mask=uniform() > 0.3)


def one_token(ratio: float, advantage: float, loss: PPOClip) -> tuple[float, float]:
    """The loss of one token with that ratio, and its derivative with respect to log π."""
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantages, behavior = torch.tensor([[advantage]]), torch.zeros(1, 1)
    value = loss(scored(logprobs, advantages, behavior=behavior)).loss
    return value.item(), slope(value, logprobs).item()


def slope(value: Tensor, variable: Tensor) -> Tensor:
    """The derivative of `value` with respect to `variable`."""
    (gradient,) = torch.autograd.grad(value, variable)
    return gradient


def rows_of(whole: Scored, rows: Tensor) -> Scored:
    """A micro-batch: some rows of the whole, with the totals of the whole."""
    taken = {name: getattr(whole, name)[rows] for name in ("logprobs", "mask", "advantages", "behavior_logprobs")}
    return whole._replace(**taken)


# -- per token ---------------------------------------------------------------------------------------------------------


def test_a_token_is_scored_by_the_logits_before_it() -> None:
    logits, tokens = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([[1, 2, 3, 4]] * 2)

    logprobs, _ = score_tokens(logits, tokens)

    for row in range(2):
        for t in range(1, 4):
            expected = torch.log_softmax(logits[row, t - 1], dim=-1)[tokens[row, t]]
            assert logprobs[row, t].item() == pytest.approx(expected.item())
    assert logprobs[:, 0].tolist() == [0, 0]


def test_the_last_logits_predict_nothing_that_is_trained() -> None:
    logits, tokens = torch.zeros(1, 3, 5, requires_grad=True), torch.tensor([[1, 2, 3]])

    gradient = slope(score_tokens(logits, tokens)[0].sum(), logits)

    assert gradient[0, 2].abs().sum() == 0
    assert gradient[0, 1].abs().sum() > 0


def test_entropy_is_that_of_the_distribution_a_token_was_drawn_from() -> None:
    certain, uniform = torch.tensor([100.0, 0, 0, 0]), torch.zeros(4)

    _, entropy = score_tokens(torch.stack([certain, uniform, certain])[None], torch.tensor([[0, 1, 2]]))

    assert entropy[0].tolist() == pytest.approx([0, 0, math.log(4)], abs=1e-6)


def test_entropy_survives_tokens_that_are_impossible() -> None:
    logits = torch.tensor([[[0.0, -math.inf], [0.0, 0.0]]])

    _, entropy = score_tokens(logits, torch.tensor([[0, 0]]))

    assert entropy.tolist() == [[0, 0]]


def test_k3_is_never_negative_and_averages_to_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0) for _ in range(2))

    estimates = kl_k3((q / p).log())

    assert (estimates >= 0).all()
    assert (p * estimates).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


# -- aggregation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 + 2 + 3) / 3),
        ("seq-mean-token-sum", ((1 + 2) + 3) / 2),
        ("seq-mean-token-mean", ((1 + 2) / 2 + 3) / 2),
    ],
)
def test_what_each_aggregation_makes_of_two_sequences(aggregation: Aggregation, expected: float) -> None:
    values = torch.tensor([[9.0, 1, 2], [9, 3, math.nan], [math.nan, 9, 9]])
    mask = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])

    assert aggregate(values, mask, aggregation, loss_tokens=3, loss_sequences=2).item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_where_nothing_trains_the_loss_is_zero_and_not_nan(aggregation: Aggregation) -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)

    assert aggregate(torch.full((2, 3), math.nan), nothing, aggregation, 0, 0).item() == 0


@EVERY_LOSS
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_batch(loss: Loss, parts: int) -> None:
    whole = random()
    whole = whole._replace(logprobs=whole.logprobs.requires_grad_())
    expected = slope(loss(whole).loss, whole.logprobs)

    pieces = [loss(rows_of(whole, rows)) for rows in torch.arange(4).chunk(parts)]
    gradient = slope(torch.stack([piece.loss for piece in pieces]).sum(), whole.logprobs)

    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
    for name, value in loss(whole).metrics.items():
        assert sum(piece.metrics[name].item() for piece in pieces) == pytest.approx(value.item())


# -- losses ------------------------------------------------------------------------------------------------------------


@EVERY_LOSS
@pytest.mark.parametrize("sign", [-1, 1])
def test_gradients_agree_with_finite_differences_for_each_sign_of_the_advantage(loss: Loss, sign: int) -> None:
    given = random(seed=3)
    given = given._replace(advantages=sign * given.advantages.abs())

    def value(logprobs: Tensor) -> Tensor:
        return loss(given._replace(logprobs=logprobs)).loss

    assert torch.autograd.gradcheck(value, given.logprobs.clone().requires_grad_())


@EVERY_LOSS
def test_masked_positions_reach_neither_loss_nor_gradient(loss: Loss) -> None:
    given = random()
    poison = torch.where(given.mask, given.advantages, math.nan)
    logprobs = given.logprobs.clone().requires_grad_()

    value = loss(given._replace(logprobs=logprobs, advantages=poison)).loss

    assert value.item() == pytest.approx(loss(given).loss.item())
    assert (slope(value, logprobs)[~given.mask] == 0).all()


@EVERY_LOSS
@pytest.mark.parametrize("sign", [-1, 1])
def test_on_policy_every_loss_makes_good_tokens_likelier_and_bad_ones_less_likely(loss: Loss, sign: int) -> None:
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    given = scored(logprobs, torch.full((1, 3), float(sign)), behavior=logprobs.detach())

    assert (slope(loss(given).loss, logprobs).sign() == -sign).all()


def test_the_advantage_weighted_loss_is_minus_the_mean_of_advantage_times_log_probability() -> None:
    given = scored(torch.tensor([[-1.0, -2.0]]), torch.tensor([[3.0, -1.0]]))

    assert AdvantageWeighted()(given).loss.item() == pytest.approx(-(3 * -1 + -1 * -2) / 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "moves"),
    [
        (1.0, 1.0, -1.0, True),
        (1.1, 1.0, -1.1, True),
        (1.5, 1.0, -1.28, False),  # likelier already: clipped above, at the higher bound
        (0.5, 1.0, -0.5, True),  # less likely, though good: never clipped
        (1.0, -1.0, 1.0, True),
        (0.5, -1.0, 0.8, False),  # less likely already: clipped below
        (1.5, -1.0, 1.5, True),  # likelier, though bad: never clipped, the gradient brings it back
        (2.9, -1.0, 2.9, True),
        (4.0, -1.0, 3.0, False),  # the dual clip
        (4.0, 1.0, -1.28, False),
    ],
)
def test_ppo_clips_where_the_papers_say(ratio: float, advantage: float, value: float, *, moves: bool) -> None:
    loss, derivative = one_token(ratio, advantage, PPOClip(clip_low=0.2, clip_high=0.28, dual_clip=3.0))

    assert loss == pytest.approx(value)
    assert derivative == pytest.approx(-ratio * advantage if moves else 0)


def test_without_a_dual_clip_a_bad_token_that_became_likelier_is_pushed_without_bound() -> None:
    assert one_token(50.0, -1.0, PPOClip())[0] == pytest.approx(50)


def test_clip_fractions_count_the_tokens_that_are_clipped() -> None:
    logprobs = torch.log(torch.tensor([[1.0, 1.5, 0.5, 4.0, 9.0]]))
    mask = torch.tensor([[True, True, True, True, False]])
    given = scored(logprobs, torch.tensor([[1.0, 1, 1, -1, 1]]), behavior=torch.zeros(1, 5), mask=mask)

    metrics = PPOClip(dual_clip=3.0)(given).metrics

    assert metrics["pg_clipfrac"].item() == pytest.approx(1 / 4)
    assert metrics["pg_clipfrac_lower"].item() == pytest.approx(1 / 4)


def test_ratios_that_overflow_stay_finite() -> None:
    given = scored(torch.zeros(1, 1), -torch.ones(1, 1), behavior=torch.full((1, 1), -500.0))

    assert PPOClip()(given).loss.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_ppo_without_behavior_logprobs_says_what_to_do() -> None:
    with pytest.raises(InvalidRecord, match="behavior_logprobs: expected a column, got none: have the sampler record"):
        PPOClip()(scored(torch.zeros(1, 1), torch.zeros(1, 1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: PPOClip(clip_low=1.2),
        lambda: PPOClip(clip_low=0),
        lambda: PPOClip(clip_high=-0.2),
        lambda: PPOClip(dual_clip=1.0),
    ],
)
def test_bounds_that_bound_nothing_are_refused(make: Callable[[], PPOClip]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()
