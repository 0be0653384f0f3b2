"""Rules for every loss."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.stages.losses.scoring import (
    HOLDING,
    LOSSES,
    STRAIGHT_THROUGH,
    diagnosed,
    part_of,
    predicted_of,
    predicting,
    random,
    reported,
    scored,
    slope,
)
from torch import Tensor

from penstock.losses import Loss, Scored

EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=repr)


def leaves(given: Scored) -> tuple[Scored, Tensor, Tensor]:
    """Return `given` with leaves for gradients, and the leaves: the logits and the log-probabilities."""
    logits, logprobs = predicted_of(given).clone().requires_grad_(), given.logprobs.clone().requires_grad_()
    return predicting(given, torch.log_softmax(logits, dim=-1), logprobs=logprobs), logits, logprobs


@EVERY_LOSS
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_batch(loss: Loss, parts: int) -> None:
    whole, logits, logprobs = leaves(random())
    value, metrics = loss(whole)
    expected = torch.autograd.grad(value, [logits, logprobs], allow_unused=True)

    again, logits, logprobs = leaves(random())
    pieces = [loss(part_of(again, sequences)) for sequences in torch.arange(5).chunk(parts)]
    total = torch.stack([piece.loss for piece in pieces]).sum()
    gradients = torch.autograd.grad(total, [logits, logprobs], allow_unused=True)

    assert total.item() == pytest.approx(value.item(), abs=1e-12)
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None and other is not None:
            torch.testing.assert_close(gradient, other, atol=1e-12, rtol=0)
    assert reported(*[piece.metrics for piece in pieces]) == pytest.approx(reported(metrics))


def far_from_the_sampling_policy(sign: int) -> Scored:
    """Return tokens whose advantages have one sign, one for each sequence, from rewards and from a teacher alike."""
    given = random(seed=3, lengths=(2, 1, 0, 3))
    of_sequence = sign * given.spread(torch.tensor([0.3, 1.1, 0.7, 0.2], dtype=torch.float64))
    of_teacher = (given.logprobs + of_sequence)[:, None]
    return replace(given, advantages=of_sequence, teacher_ids=given.tokens[:, None].int(), teacher_logprobs=of_teacher)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in HOLDING + STRAIGHT_THROUGH], ids=repr)
@pytest.mark.parametrize("sign", [-1, 1])
def test_gradients_agree_with_finite_differences_for_each_sign_of_the_advantage(loss: Loss, sign: int) -> None:
    given = far_from_the_sampling_policy(sign)

    def value(logits: Tensor, logprobs: Tensor) -> Tensor:
        return loss(predicting(given, torch.log_softmax(logits, dim=-1), logprobs=logprobs)).loss

    _, logits, logprobs = leaves(given)
    assert torch.autograd.gradcheck(value, (logits, logprobs))


@pytest.mark.parametrize("loss", HOLDING, ids=repr)
@pytest.mark.parametrize("sign", [-1, 1])
def test_gradients_agree_with_finite_differences_where_detached_factors_are_constant(loss: Loss, sign: int) -> None:
    """The sampling policy and the teacher change along, so that ratios to them are constant."""
    given = far_from_the_sampling_policy(sign)

    def value(logits: Tensor, logprobs: Tensor) -> Tensor:
        still = predicted_of(given) + (logits - logits.detach())
        moved = logprobs.detach() - given.logprobs
        along = replace(
            given,
            behavior_logprobs=given.behavior() + moved,
            teacher_logprobs=given.teacher()[1] + moved[:, None],
        )
        return loss(predicting(along, still, logprobs=logprobs)).loss

    _, logits, logprobs = leaves(given)
    assert torch.autograd.gradcheck(value, (logits, logprobs))
    towards = -sign * slope(value(logits, logprobs), logprobs)
    assert (towards >= 0).all()
    assert towards.any()


@EVERY_LOSS
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("first", [True, False], ids=["first update", "later update"])
def test_on_policy_every_loss_makes_tokens_with_positive_advantage_likelier_and_others_less_likely(
    loss: Loss, sign: int, *, first: bool
) -> None:
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    same = logprobs.detach()
    given = scored(
        logprobs,
        torch.full((3,), float(sign)),
        behavior_logprobs=same,
        proximal_logprobs=None if first else same,
        ref_logprobs=same,
        predicted=torch.zeros(3, 1),
    )

    assert (slope(loss(given).loss, logprobs).sign() == -sign).all()


@EVERY_LOSS
def test_where_nothing_trains_the_loss_is_zero_and_not_nan(loss: Loss) -> None:
    none = torch.zeros(0, requires_grad=True)
    given = scored(none, none.detach(), behavior_logprobs=none.detach(), ref_logprobs=none.detach(), lengths=[0, 0])

    value, metrics = loss(given)

    assert value.item() == 0
    assert not [name for name, metric in metrics.items() if math.isnan(metric.value())]


@EVERY_LOSS
def test_log_probabilities_far_apart_give_a_finite_loss_and_gradient(loss: Loss) -> None:
    logprobs = torch.tensor([-1.0, -300.0], requires_grad=True)
    far = torch.tensor([-300.0, -1.0])
    given = scored(logprobs, torch.tensor([1.0, -1.0]), behavior_logprobs=far, proximal_logprobs=far, ref_logprobs=far)

    value, metrics = loss(given)

    assert math.isfinite(value.item())
    assert slope(value, logprobs).isfinite().all()
    assert all(math.isfinite(metric.value()) for metric in metrics.values())


def test_diagnostics_of_micro_batches_add_up_and_extremes_stay_extremes() -> None:
    whole = random()

    values = diagnosed(*[part_of(whole, sequences) for sequences in torch.arange(5).chunk(3)])

    assert whole.behavior_logprobs is not None
    ratio = (whole.logprobs - whole.behavior_logprobs).exp()
    assert values == pytest.approx(diagnosed(whole))
    assert values["kl_k1"] == pytest.approx(-ratio.log().mean().item())
    assert values["kl"] == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    assert values["entropy"] == pytest.approx(-(predicted_of(whole).exp() * predicted_of(whole)).sum(-1).mean().item())
    assert (values["ratio/min"], values["ratio/max"]) == (ratio.min().item(), ratio.max().item())
    assert values["ratio/effective_sample_size"] == pytest.approx((ratio.mean() ** 2 / (ratio**2).mean()).item())


def test_the_entropy_of_a_long_micro_batch_is_that_of_all_its_tokens() -> None:
    predicted = torch.tensor([0.0, -math.inf]).repeat(5001, 1)
    predicted[-1] = math.log(0.5)
    long = scored(torch.zeros(len(predicted)), torch.zeros(len(predicted)), predicted=predicted)

    assert diagnosed(long)["entropy"] == pytest.approx(math.log(2) / len(predicted))
