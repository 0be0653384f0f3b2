"""ClipCov, KLCov and TopEntropyMask: the numbers of verl, SkyRL and TRL, and the tokens that are chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.stages.losses.scoring import random, scored, slope
from torch import Tensor

from penstock.errors import InvalidConfig, InvalidRecord
from penstock.losses import ClipCov, KLCov, PPOClip, Scored, Term, TokenChoice, TopEntropyMask

Floats = NDArray[np.float64]


def given(seed: int = 0, lengths: tuple[int, ...] = (3, 9, 1, 6, 4)) -> Scored:
    of = random(seed, lengths)
    return replace(of, logprobs=(4 * of.logprobs).requires_grad_(), advantages=6 * of.advantage())


def chosen(rule: TokenChoice, of: Scored) -> Scored:
    """Return `of` with the tokens that `rule` chooses when it is all of the batch."""
    with torch.no_grad():
        measured = rule.measured(of).double().numpy()
    return replace(of, chosen={rule: torch.from_numpy(rule.choose(measured))})


def values_and_slopes(term: Term, of: Scored) -> tuple[Floats, Floats]:
    values = term.per_token(of).values
    return values.detach().numpy(), slope(values.sum(), of.logprobs).numpy()


def columns(of: Scored) -> tuple[Floats, Floats, Floats]:
    """Return log-probabilities of the policy and of the one that sampled, and advantages."""
    return of.logprobs.detach().numpy(), of.behavior().numpy(), of.advantage().numpy()


def covariances(of: Scored) -> Floats:
    """verl core_algos.py:1812-1814 of 0.9.1, skyrl ppo_utils.py:912-914 of 0.3.0.

    cov_all = (advantages - verl_F.masked_mean(advantages, response_mask)) * (
        log_prob - verl_F.masked_mean(log_prob.detach(), response_mask)
    )
    """
    new, _, a = columns(of)
    return np.asarray((a - a.mean()) * (new - new.mean()))


# -- values and gradients ----------------------------------------------------------------------------------------------


def verl_kl_cov(of: Scored, share: float, coefficient: float) -> tuple[Floats, Floats]:
    """verl core_algos.py:1889-1913 of 0.9.1, skyrl ppo_utils.py:953-983 of 0.3.0.

    abs_kl = negative_approx_kl.abs()
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -advantages * ratio
    pg_losses_kl = -advantages * ratio + ppo_kl_coef * abs_kl
    …
    k_percent_nums = max(1, int(len(cov_lst_all) * kl_cov_ratio))
    large_cov_idxs = torch.topk(cov_lst_all, k_percent_nums, largest=True).indices
    """
    new, old, a = columns(of)
    values, slopes = -a * np.exp(new - old), -a * np.exp(new - old)
    highest = np.argsort(covariances(of))[::-1][: max(1, int(len(new) * share))]
    values[highest] += coefficient * abs(new - old)[highest]
    slopes[highest] += coefficient * np.sign(new - old)[highest]
    return values, slopes


@pytest.mark.parametrize(("share", "coefficient"), [(0.0002, 1.0), (0.3, 0.5), (1.0, 2.0)])
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_has_the_values_and_gradients_of_verl(share: float, coefficient: float, seed: int) -> None:
    term = KLCov(share, coefficient)
    of = chosen(term, given(seed))

    for found, expected in zip(values_and_slopes(term, of), verl_kl_cov(of, share, coefficient), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def verl_clip_cov(of: Scored, corrected: NDArray[np.bool_], low: float, high: float) -> tuple[Floats, Floats]:
    """verl core_algos.py:1809-1832 of 0.9.1, skyrl ppo_utils.py:906-935 of 0.3.0; `corrected` is where corr is 0.

    pg_losses2 = -advantages * torch.clamp(ratio, 1 - cliprange_low, 1 + cliprange_high)
    …
    pg_losses = torch.maximum(pg_losses1, pg_losses2) * corr
    """
    new, old, a = columns(of)
    r = np.exp(new - old)
    unclipped, bounded = -a * r, -a * np.clip(r, 1 - low, 1 + high)
    values = np.where(corrected, 0.0, np.maximum(unclipped, bounded))
    within = (r >= 1 - low) & (r <= 1 + high)
    return values, np.where(corrected | ((bounded > unclipped) & ~within), 0.0, -a * r)


def candidates_of_verl(of: Scored, low: float, high: float, least: float, most: float) -> NDArray[np.bool_]:
    """verl core_algos.py:1810 and 1815-1819 of 0.9.1, skyrl ppo_utils.py:909 and 915-919 of 0.3.0.

    clip_by_origin = (pg_losses2 > pg_losses1) & (response_mask > 0)
    …
    cov_all[clip_by_origin] = -torch.inf
    clip_num = max(int(clip_cov_ratio * response_mask.sum().item()), 1)
    top_k_idx = (cov_all < clip_cov_ub) & (cov_all > clip_cov_lb) & (response_mask > 0)
    """
    new, old, a = columns(of)
    r = np.exp(new - old)
    at_a_bound = -a * np.clip(r, 1 - low, 1 + high) > -a * r
    cov = np.where(at_a_bound, -np.inf, covariances(of))
    return np.asarray((cov < most) & (cov > least))


@pytest.mark.parametrize(("share", "least", "most"), [(0.0002, 0.0, 5.0), (0.1, 0.1, 2.0), (1.0, -1.0, 99.0)])
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_has_the_values_and_gradients_of_verl(share: float, least: float, most: float, seed: int) -> None:
    term = ClipCov(0.2, 0.3, share, least, most)
    of = chosen(term, given(seed))
    candidates = candidates_of_verl(of, 0.2, 0.3, least, most)
    taken = of.chosen[term].numpy()

    assert not (taken & ~candidates).any()
    assert taken.sum() == min(max(int(share * len(taken)), 1), candidates.sum())
    for found, expected in zip(values_and_slopes(term, of), verl_clip_cov(of, taken, 0.2, 0.3), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_of_entropy_is_that_of_trl(share: float, seed: int) -> None:
    """trl grpo_trainer.py:1413-1416 and 3050 of 1.16.0.

    entropy_threshold = torch.quantile(gathered, threshold)
    masked_entropies = entropies * mask.float()
    entropy_mask = masked_entropies >= entropy_threshold
    …
    entropy_mask = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
    """
    mask = TopEntropyMask(share)
    of = chosen(mask, given(seed))
    expected = of.entropy >= torch.quantile(of.entropy, 1 - share)
    values, slopes = values_and_slopes(PPOClip(), of)

    found = values_and_slopes(PPOClip() * mask, of)

    np.testing.assert_array_equal(found[0], np.where(expected, values, 0))
    np.testing.assert_array_equal(found[1], np.where(expected, slopes, 0))


# -- extremes ----------------------------------------------------------------------------------------------------------

RULES: list[Any] = [ClipCov(least=-1.0), KLCov(), TopEntropyMask()]


def term_of(rule: Any) -> Term:
    return rule if isinstance(rule, Term) else PPOClip() * rule


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_of_one_token_it_is_the_one(rule: Any) -> None:
    one = chosen(rule, given(lengths=(1,)))

    assert one.chosen[rule].tolist() == [True]
    assert term_of(rule).per_token(one).values.isfinite().all()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_micro_batch_without_tokens_has_no_values(rule: Any) -> None:
    none = torch.zeros(0)
    empty = replace(scored(none, none, behavior_logprobs=none), chosen={rule: none.bool()})

    assert rule.measured(empty).shape == (0, rule.measurements)
    assert term_of(rule).per_token(empty).values.shape == (0,)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("change", [1e4, -1e4, math.inf])
def test_values_stay_finite_with_extreme_ratios(rule: Any, change: float) -> None:
    of = given()
    extreme = chosen(rule, replace(of, behavior_logprobs=of.logprobs.detach() - change))

    assert term_of(rule).per_token(extreme).values.isfinite().all()


def test_equal_advantages_have_no_covariance_to_be_clipped() -> None:
    of = given()
    equal = chosen(ClipCov(least=0.0, share=1.0), replace(of, advantages=torch.ones_like(of.advantage())))

    assert not equal.chosen[ClipCov(least=0.0, share=1.0)].any()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_without_a_trainer_that_chooses_a_term_is_refused(rule: Any) -> None:
    with pytest.raises(InvalidRecord, match="chosen: expected a column, got none: give the loss to a TorchTrainer"):
        term_of(rule).per_token(given())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClipCov(share=0.0), "share: expected a number above 0 and up to 1, got 0.0"),
        (lambda: KLCov(share=1.5), "share: expected a number above 0 and up to 1, got 1.5"),
        (lambda: TopEntropyMask(math.nan), "share: expected a number above 0 and up to 1, got nan"),
        (lambda: ClipCov(least=5.0, most=1.0), "least, most: expected least < most, got 5.0 and 1.0"),
        (lambda: KLCov(weight=-1.0), "weight: expected a finite number above 0, got -1.0"),
    ],
)
def test_invalid_numbers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make()


def test_a_loss_states_its_rules_once() -> None:
    loss = (ClipCov() * TopEntropyMask() + KLCov() + 2 * KLCov()).aggregated("seq-mean-token-mean")

    assert loss.choices == (ClipCov(), TopEntropyMask(), KLCov())


def metric(of: Scored, term: Term, name: str) -> Tensor | float:
    return term.per_token(of).metrics[name].value()


def test_the_share_of_chosen_tokens_is_reported() -> None:
    term = KLCov(0.25)

    assert metric(chosen(term, given()), term, "cov/chosen") == pytest.approx(5 / 23)
