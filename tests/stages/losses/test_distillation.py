from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.stages.losses.scoring import part_of, predicted_of, predicting, reported, scored, slope
from torch import Tensor

from penstock.errors import InvalidRecord
from penstock.losses import (
    AdvantageWeighted,
    Distillation,
    ImportanceWeight,
    Loss,
    PPOClip,
    SampledDistillation,
    Scored,
)

VOCABULARY = 5
TOKENS_USED = "distill/tokens_used"
MODES: list[Any] = ["raw", "renormalised", "tail"]
DIVERGENCES = [Distillation("forward_kl"), Distillation("reverse_kl"), Distillation("jsd", beta=0.3)]

EVERY_MODE = pytest.mark.parametrize("mode", MODES)
EVERY_DIVERGENCE = pytest.mark.parametrize("term", DIVERGENCES, ids=lambda term: term.divergence)


def predictions(rows: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return [rows, V] log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(rows, VOCABULARY, generator=generator, dtype=dtype), dim=-1)


def taught(predicted: Tensor, ids: list[list[int]], logprobs: Tensor, **columns: Any) -> Scored:
    """Return one sequence of the tokens 0, 1, 2, … for which the policy predicts `predicted`."""
    tokens = torch.arange(len(predicted)) % predicted.shape[1]
    given: dict[str, Any] = {
        "predicted": predicted,
        "tokens": tokens,
        "teacher_ids": torch.tensor(ids, dtype=torch.int32),
        "teacher_logprobs": logprobs,
    }
    return scored(predicted.gather(-1, tokens[:, None]).squeeze(-1), torch.ones(len(ids)), **(given | columns))


def candidate_logprobs(teacher: Tensor, ids: list[list[int]]) -> Tensor:
    """Return the log-probabilities of candidates under `teacher` [T, V]; those of absent candidates must not matter."""
    wanted = torch.tensor(ids)
    return teacher.gather(-1, wanted.clamp(min=0)).where(wanted >= 0, 0.7)


RAGGED = [[3, 0, 1], [-1, 2, -1], [-1, -1, -1], [4, -1, 2], [0, 1, 4]]
"""Candidates as they come: of any number and order, with and without the token itself, none at all."""


def ragged(dtype: torch.dtype = torch.float64, **columns: Any) -> Scored:
    teacher = predictions(5, seed=1, dtype=dtype)
    logprobs = candidate_logprobs(teacher, RAGGED)
    logprobs[4, 2] = -math.inf
    return taught(predictions(5, dtype=dtype), RAGGED, logprobs, **columns)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def divergence(term: Distillation, p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of two distributions, by definition."""
    if term.beta is None:
        return kl(p, q) if term.divergence == "forward_kl" else kl(q, p)
    mixture = term.beta * p + (1 - term.beta) * q
    return term.beta * kl(p, mixture) + (1 - term.beta) * kl(q, mixture)


def costs(term: Distillation | SampledDistillation, given: Scored) -> list[float]:
    return term.per_token(given).values.tolist()


# -- values ------------------------------------------------------------------------------------------------------------


@EVERY_MODE
@EVERY_DIVERGENCE
def test_with_the_whole_vocabulary_as_candidates_every_mode_gives_the_divergence(term: Distillation, mode: Any) -> None:
    teacher, policy = predictions(3, seed=1), predictions(3)
    ids = [[3, 1, 4, -1, 0, 2], [0, 1, 2, 3, 4, -1], [-1, 4, 3, 2, 1, 0]]

    found = costs(replace(term, mode=mode), taught(policy, ids, candidate_logprobs(teacher, ids)))

    assert found == pytest.approx(divergence(term, teacher.exp(), policy.exp()).tolist(), abs=1e-12)


@EVERY_DIVERGENCE
def test_with_fewer_candidates_the_modes_are_three_different_numbers(term: Distillation) -> None:
    policy = torch.tensor([[0.2, 0.4, 0.1, 0.2, 0.1]]).double()
    given = taught(policy.log(), [[1, 0, -1]], torch.tensor([[0.3, 0.5, 1.0]]).double().log())

    found = {mode: costs(replace(term, mode=mode), given)[0] for mode in MODES}

    p, q = torch.tensor([0.3, 0.5]), torch.tensor([0.4, 0.2])
    expected = {
        "raw": divergence(term, p, q),
        "renormalised": divergence(term, p / 0.8, q / 0.6),
        "tail": divergence(term, torch.tensor([0.3, 0.5, 0.2]), torch.tensor([0.4, 0.2, 0.4])),
    }
    assert found == pytest.approx({mode: value.item() for mode, value in expected.items()}, abs=1e-6)
    assert len({round(value, 2) for value in found.values()}) == 3


@EVERY_MODE
@EVERY_DIVERGENCE
def test_neither_the_order_of_candidates_nor_where_padding_stands_matters(term: Distillation, mode: Any) -> None:
    given = ragged()
    assert given.teacher_ids is not None
    assert given.teacher_logprobs is not None
    order = torch.tensor([2, 0, 1])
    other = replace(given, teacher_ids=given.teacher_ids[:, order], teacher_logprobs=given.teacher_logprobs[:, order])

    assert costs(replace(term, mode=mode), other) == pytest.approx(costs(replace(term, mode=mode), given))


@EVERY_MODE
@EVERY_DIVERGENCE
def test_a_policy_equal_to_its_teacher_has_zero_loss_and_gradient(term: Distillation, mode: Any) -> None:
    teacher = predictions(5, seed=1)
    logits = teacher.clone().requires_grad_()

    given = taught(torch.log_softmax(logits, -1), RAGGED, candidate_logprobs(teacher, RAGGED))
    values = replace(term, mode=mode).per_token(given).values

    torch.testing.assert_close(values, torch.zeros_like(values), atol=1e-12, rtol=0)
    if mode != "raw":  # where all of the probability is on the candidates, raw costs less still
        torch.testing.assert_close(slope(values.sum(), logits), torch.zeros_like(logits), atol=1e-12, rtol=0)


@EVERY_DIVERGENCE
def test_a_token_without_candidates_costs_nothing_moves_nothing_and_counts_in_the_mean(term: Distillation) -> None:
    """Filled with zeros, it would have a teacher that finds all tokens equally likely."""
    logits = predictions(5).requires_grad_()
    given = predicting(ragged(), torch.log_softmax(logits, -1))

    values, metrics = term.per_token(given)
    gradient = slope(values.sum(), logits)

    assert values[2] == 0
    assert not gradient[2].any()
    assert gradient[[0, 1, 3, 4]].any(-1).all()
    assert metrics[TOKENS_USED].value() == 4
    assert term(given).loss.item() == pytest.approx(values.sum().item() / 5)


def test_renormalised_a_token_with_one_candidate_is_not_used() -> None:
    values, metrics = Distillation(mode="renormalised").per_token(ragged())

    assert values[1] == 0
    assert metrics[TOKENS_USED].value() == 3


@EVERY_DIVERGENCE
def test_the_policy_is_compared_at_temperature_one_for_any_sampling_temperature(term: Distillation) -> None:
    given = ragged()
    tempered = predicting(given, torch.log_softmax(predicted_of(given) / 0.6, -1), temperature=0.6)

    assert costs(term, tempered) == pytest.approx(costs(term, given))


@EVERY_DIVERGENCE
def test_logits_of_minus_infinity_beside_the_candidates_are_no_tail(term: Distillation) -> None:
    """As a model has them whose vocabulary is padded: the rest of it is impossible, not merely improbable."""
    logits = torch.tensor([[1.0, 0.0, -math.inf, -math.inf, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[0.7, 0.3]]).log()

    value = term.per_token(taught(torch.log_softmax(logits, -1), [[0, 1]], teacher)).values.sum()

    expected = divergence(term, torch.tensor([0.7, 0.3]), torch.softmax(torch.tensor([1.0, 0.0]), 0))
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    assert slope(value, logits).isfinite().all()


@EVERY_DIVERGENCE
@pytest.mark.parametrize("rest", [1e-9, 0.0], ids=["hardly any", "none"])
def test_in_float32_a_tail_that_is_lost_in_rounding_leaves_loss_and_gradient_what_they_are(
    term: Distillation, rest: float
) -> None:
    """Taken as 1 − Σ, the policy's tail would be 0 or noise, and its logarithm a gradient of millions."""
    policy = torch.tensor([[0.6, 0.4 - rest, rest / 3, rest / 3, rest / 3]], dtype=torch.float64)
    logits = policy.clamp(min=1e-30).log().float().requires_grad_()
    teacher = torch.tensor([[0.7, 0.3]]).log()
    assert teacher.exp().sum() >= 1

    value = term.per_token(taught(torch.log_softmax(logits, -1), [[0, 1]], teacher)).values.sum()

    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.6, 0.4])
    assert value.item() == pytest.approx(divergence(term, p, q).item(), abs=1e-5)
    assert slope(value, logits)[0, 2:].abs().max() < 1e-5


# -- gradients and batches ---------------------------------------------------------------------------------------------


@EVERY_MODE
@EVERY_DIVERGENCE
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_agree_with_finite_differences(term: Distillation, mode: Any, temperature: float) -> None:
    loss, given = replace(term, mode=mode), ragged(temperature=temperature)

    def value(logits: Tensor) -> Tensor:
        return loss(predicting(given, torch.log_softmax(logits / temperature, -1), temperature)).loss

    assert torch.autograd.gradcheck(value, predicted_of(given).clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    "loss",
    [
        *DIVERGENCES,
        Distillation(mode="renormalised").aggregated("seq-mean-token-mean"),
        SampledDistillation(),
        PPOClip() + 0.5 * Distillation(),
        (AdvantageWeighted() + 0.5 * (SampledDistillation() * ImportanceWeight())).aggregated("seq-mean-token-sum"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_losses_and_gradients_of_micro_batches_add_up_to_those_of_the_batch(loss: Loss, parts: int) -> None:
    def total(pieces: int) -> tuple[float, Tensor, float]:
        logits = predictions(5).requires_grad_()
        whole = ragged(lengths=[1, 1, 1, 0, 2], behavior_logprobs=-torch.rand(5, generator=torch.Generator()).double())
        whole = predicting(whole, torch.log_softmax(logits, -1))
        whole = replace(whole, logprobs=predicted_of(whole).gather(-1, whole.tokens[:, None]).squeeze(-1))
        values = [loss(part_of(whole, sequences)) for sequences in torch.arange(5).chunk(pieces)]
        summed = torch.stack([each.loss for each in values]).sum()
        return summed.item(), slope(summed, logits), reported(*[each.metrics for each in values])[TOKENS_USED]

    loss_of_all, gradient_of_all, used_of_all = total(1)
    summed, gradient, used = total(parts)

    assert summed == pytest.approx(loss_of_all, abs=1e-12)
    torch.testing.assert_close(gradient, gradient_of_all, atol=1e-12, rtol=0)
    assert used == used_of_all > 0


def test_beside_a_policy_loss_each_loss_has_its_own_value() -> None:
    given = ragged(behavior_logprobs=torch.full((5,), -1.0).double())

    value, metrics = (PPOClip() + 0.5 * Distillation())(given)

    alone = {"policy": PPOClip()(given).loss, "distillation": Distillation()(given).loss}
    assert value.item() == pytest.approx((alone["policy"] + 0.5 * alone["distillation"]).item())
    assert metrics["loss/distillation"].value() == pytest.approx(alone["distillation"].item())
    assert metrics[TOKENS_USED].value() == 4


# -- sampled -----------------------------------------------------------------------------------------------------------


def test_a_sampled_token_has_the_teacher_s_log_probability_over_the_policy_s_as_its_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    given = scored(
        logprobs,
        torch.full((2,), math.nan),  # for any advantages of the policy loss
        predicted=torch.tensor([[-9.0, -1.0], [-2.0, -9.0]]),
        tokens=torch.tensor([1, 0]),
        teacher_ids=torch.tensor([[0, 1], [0, -1]]),
        teacher_logprobs=torch.tensor([[-3.0, -0.5], [-4.0, 0.0]]),
    )

    values, metrics = SampledDistillation().per_token(given)

    assert values.tolist() == pytest.approx([-0.5 * -1.0, 2.0 * -2.0])
    assert slope(values.sum(), logprobs).tolist() == pytest.approx([-0.5, 2.0])
    assert metrics[TOKENS_USED].value() == 2


def test_a_sampled_token_that_is_no_candidate_is_not_used() -> None:
    ids = [[1, 2], [0, -1], [2, 0]]

    values, metrics = SampledDistillation().per_token(
        taught(predictions(3), ids, candidate_logprobs(predictions(3, seed=1), ids))
    )

    assert values[:2].tolist() == [0, 0]
    assert values[2] != 0
    assert metrics[TOKENS_USED].value() == 1


def test_on_policy_the_sampled_form_has_the_gradient_of_the_reverse_divergence() -> None:
    """Over all tokens that could have been sampled, each as often as it would be."""
    logits, teacher = predictions(1).requires_grad_(), predictions(1, seed=1)
    predicted = torch.log_softmax(logits, -1)
    every = predicted.expand(VOCABULARY, -1)
    ids = [list(range(VOCABULARY))] * VOCABULARY

    sampled = SampledDistillation().per_token(taught(every, ids, teacher.expand(VOCABULARY, -1))).values
    gradient = slope((predicted[0].detach().exp() * sampled).sum(), logits)

    of_divergence = slope(kl(torch.softmax(logits, -1), teacher.exp()).sum(), logits)
    torch.testing.assert_close(gradient, of_divergence)


def test_the_sampled_form_compares_at_temperature_one() -> None:
    given = ragged()
    tempered = predicting(given, torch.log_softmax(predicted_of(given) / 0.6, -1), temperature=0.6)

    assert costs(SampledDistillation(), tempered) == pytest.approx(costs(SampledDistillation(), given))


def test_stale_samples_are_weighted() -> None:
    given = ragged(behavior_logprobs=predictions(5)[:, 0] - 0.1)

    weighted = (SampledDistillation() * ImportanceWeight()).per_token(given).values

    ratio = (given.logprobs - given.behavior()).exp().clamp(max=2)
    torch.testing.assert_close(weighted, ratio * SampledDistillation().per_token(given).values)


def test_a_log_probability_that_stands_for_impossible_does_not_carry_everything_else_away() -> None:
    given = taught(predictions(1), [[0]], torch.tensor([[-9999.0]]))

    assert costs(SampledDistillation(), given) == pytest.approx((20 * given.logprobs).tolist())


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[[0], [1]], [[0, -1], [3, 1]]], ids=["alone", "and the token itself"])
def test_one_candidate_renormalised_is_refused_with_the_reason(ids: list[list[int]]) -> None:
    given = taught(predictions(2), ids, torch.full((2, len(ids[0])), -1.0))

    with pytest.raises(InvalidRecord, match="divergence is always 0"):
        Distillation(mode="renormalised").per_token(given)
    assert all(value > 0 for value in costs(Distillation(), given))


@pytest.mark.parametrize("term", [Distillation(), SampledDistillation()], ids=repr)
def test_a_batch_without_a_teacher_is_an_error_with_the_remedy(term: Loss) -> None:
    with pytest.raises(InvalidRecord, match="teacher_ids: expected a column, got none: put a Teacher"):
        term(scored(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize("term", [Distillation(), SampledDistillation()], ids=repr)
@pytest.mark.parametrize("ids", [[[-1, -1]] * 2, [[]] * 2], ids=["padding", "no columns"])
def test_a_batch_of_which_nothing_can_be_used_is_refused_and_not_a_quiet_nothing(
    term: Loss, ids: list[list[int]]
) -> None:
    value, metrics = term(taught(predictions(2), ids, torch.zeros(2, len(ids[0])).double()))

    assert value.item() == 0
    with pytest.raises(InvalidRecord, match="distill/tokens_used: expected some of the tokens that train, got none"):
        reported(metrics)


def test_a_term_that_can_use_nothing_is_not_hidden_by_another_that_can() -> None:
    given = taught(predictions(1), [[0, -1, -1]], torch.full((1, 3), -1.0).double())
    loss = SampledDistillation() + 0.5 * Distillation(mode="renormalised")

    metrics = loss(given).metrics

    assert metrics[TOKENS_USED].value() == 1
    with pytest.raises(InvalidRecord, match="distillation_2/distill/tokens_used: expected some of the tokens"):
        reported(metrics)


def test_weighted_distillation_is_reported_as_distillation() -> None:
    given = ragged(behavior_logprobs=torch.full((5,), -1.0).double())

    metrics = (AdvantageWeighted() + SampledDistillation() * ImportanceWeight())(given).metrics

    assert {"loss/policy", "loss/distillation"} <= metrics.keys()


def test_a_micro_batch_of_which_nothing_can_be_used_is_none_of_that() -> None:
    whole = ragged(lengths=[1, 1, 1, 1, 1])

    parts = [Distillation()(part_of(whole, sequences)).metrics for sequences in torch.arange(5).chunk(5)]

    assert reported(*parts)[TOKENS_USED] > 0


def test_a_candidate_beyond_the_policy_s_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRecord, match="expected ids below 5, for which the policy has logits, got 7"):
        Distillation().per_token(taught(predictions(1), [[7, 1]], torch.zeros(1, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distillation("kl"), "divergence: expected one of forward_kl, reverse_kl, jsd, got 'kl'"),  # type: ignore[arg-type]
        (lambda: Distillation(mode="topk"), "mode: expected one of raw, renormalised, tail, got 'topk'"),  # type: ignore[arg-type]
        (lambda: Distillation("jsd"), "beta: expected with 'jsd' and only there, got None"),
        (lambda: Distillation(beta=0.5), "beta: expected with 'jsd' and only there, got 0.5"),
        (lambda: Distillation("jsd", beta=1.0), "beta: expected between 0 and 1, got 1.0"),
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], Distillation], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
