from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stages.losses.scoring import random, scored
from torch import Tensor

from penstock.errors import InvalidRecord
from penstock.losses import KL, AdvantageWeighted, Aggregated, Entropy, ImportanceWeight, PPOClip


@pytest.mark.parametrize(
    ("aggregation", "longest", "expected"),
    [
        ("token-mean", None, (1 + 2 + 3) / 3),
        ("seq-mean-token-sum", None, ((1 + 2) + 3) / 2),
        ("seq-mean-token-mean", None, ((1 + 2) / 2 + 3) / 2),
        ("seq-mean-token-sum-norm", 10, ((1 + 2) / 10 + 3 / 10) / 2),
    ],
)
def test_each_aggregation_of_two_sequences(aggregation: Any, longest: int | None, expected: float) -> None:
    costs = scored(torch.tensor([-1.0, -2.0, -3.0]), torch.ones(3), lengths=[2, 0, 1])

    loss = AdvantageWeighted().aggregated(aggregation, longest=longest)

    assert loss(costs).loss.item() == pytest.approx(expected)


def test_a_loss_is_the_sum_of_its_terms_and_reports_each_of_them() -> None:
    given = random()
    policy, divergence, entropy = (term(given).loss for term in (PPOClip(), KL("k2"), Entropy()))

    value, metrics = (0.5 * PPOClip() + 0.1 * KL("k2") - 0.01 * Entropy())(given)

    assert value.item() == pytest.approx((0.5 * policy + 0.1 * divergence - 0.01 * entropy).item())
    assert {name: metrics[f"loss/{name}"].value() for name in ("policy", "kl", "entropy")} == pytest.approx(
        {"policy": policy.item(), "kl": divergence.item(), "entropy": entropy.item()}
    )


def test_terms_with_equal_metrics_report_them_under_different_names() -> None:
    """Added up as if they were micro-batches, they would come to shares above 1."""
    given, weight = random(), ImportanceWeight(high=1.1)
    first, second, third = PPOClip(0.1, 0.1), AdvantageWeighted() * weight, PPOClip(old="proximal") * weight

    metrics = (first + 0.5 * second + 2 * third)(given).metrics

    for name, (alone, reported) in {
        "pg_clipfrac/high": (first, "pg_clipfrac/high"),
        "importance/high": (second, "importance/high"),
        "policy_3/pg_clipfrac/high": (third, "pg_clipfrac/high"),
        "policy_3/importance/high": (third, "importance/high"),
    }.items():
        assert metrics[name].value() == alone(given).metrics[reported].value()
    for name, term in {"loss/policy": first, "loss/policy_2": second, "loss/policy_3": third}.items():
        assert metrics[name].value() == pytest.approx(term(given).loss.item())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip().aggregated("mean"), "aggregation: expected one of token-mean, "),  # type: ignore[arg-type]
        (lambda: PPOClip().aggregated("seq-mean-token-sum-norm"), "longest: expected with 'seq-mean-token-sum-norm'"),
        (lambda: PPOClip().aggregated("token-mean", longest=3), "longest: expected with 'seq-mean-token-sum-norm'"),
        (
            lambda: PPOClip().aggregated("seq-mean-token-sum-norm", longest=0),
            "longest: expected a whole number of at least 1, got 0",
        ),
        (lambda: PPOClip().aggregated("token-mean", counted="all"), "counted: expected 'all' with a mean over seq"),
        (
            lambda: PPOClip().aggregated("seq-mean-token-sum", counted="every"),  # type: ignore[arg-type]
            "counted: expected one of trained, all, got 'every'",
        ),
    ],
)
def test_invalid_aggregations_are_refused(make: Callable[[], Aggregated], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- kl ----------------------------------------------------------------------------------------------------------------


def estimates(estimator: Any, log_p: Tensor, log_q: Tensor) -> Tensor:
    return KL(estimator).per_token(scored(log_p, torch.zeros(len(log_p)), ref_logprobs=log_q)).values


def test_k1_and_k3_average_to_the_divergence_and_k3_is_never_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(torch.randn(6, generator=generator, dtype=torch.float64), 0) for _ in range(2))
    divergence = (p * (p / q).log()).sum().item()

    k1, k3 = estimates("k1", p.log(), q.log()), estimates("k3", p.log(), q.log())

    assert (k3 >= 0).all()
    assert [(p * each).sum().item() for each in (k1, k3)] == pytest.approx([divergence, divergence])


def test_on_policy_k2_has_the_gradient_of_the_divergence_k3_that_of_the_other_way_round_and_k1_none() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    log_p, log_q = torch.log_softmax(logits, 0), torch.log_softmax(other, 0).detach()
    p = log_p.detach().exp()

    exact, other_way, k1, k2, k3 = (
        torch.autograd.grad(value, logits, retain_graph=True)[0]
        for value in (
            (log_p.exp() * (log_p - log_q)).sum(),
            (log_q.exp() * (log_q - log_p)).sum(),
            (p * estimates("k1", log_p, log_q)).sum(),
            (p * estimates("k2", log_p, log_q)).sum(),
            (p * estimates("k3", log_p, log_q)).sum(),
        )
    )

    torch.testing.assert_close(k2, exact)
    torch.testing.assert_close(k3, other_way)
    torch.testing.assert_close(k1, torch.zeros_like(k1))


def test_a_divergence_without_a_reference_names_the_remedy() -> None:
    with pytest.raises(InvalidRecord, match="ref_logprobs: expected a column, got none: give the TorchTrainer"):
        KL()(scored(torch.zeros(1), torch.zeros(1)))


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"estimator: expected one of k1, k2, k3, k1\+, k3\+, got 'k4'"):
        KL("k4")  # type: ignore[arg-type]


# -- entropy -----------------------------------------------------------------------------------------------------------


def entropies(logits: Tensor) -> Tensor:
    zeros = torch.zeros(len(logits))
    return Entropy().per_token(scored(zeros, zeros, predicted=torch.log_softmax(logits, dim=-1))).values


def test_entropy_is_that_of_the_whole_distribution() -> None:
    certain, uniform = torch.tensor([100.0, 0, 0, 0]), torch.zeros(4)

    entropy = entropies(torch.stack([certain, uniform]))

    assert entropy.tolist() == pytest.approx([0, math.log(4)], abs=1e-6)


def test_entropy_and_its_gradient_survive_tokens_that_are_impossible() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)

    entropy = entropies(logits).sum()

    assert entropy.item() == pytest.approx(entropies(torch.tensor([[0.0, 1.0]])).item())
    assert torch.autograd.grad(entropy, logits)[0].isfinite().all()
