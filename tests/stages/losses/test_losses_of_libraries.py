"""Policy terms, masks and KL beside verl, SkyRL, prime-rl and TRL, written down from their sources in numpy.

Nothing is shared with penstock: rectangles [B, L] with a mask, as the libraries have them. Each function quotes the
lines that it copies. Gradients are those of the tokens' values with respect to log π, by hand.

    verl      verl/trainer/ppo/core_algos.py, and verl/trainer/ppo/rollout_corr_helper.py            of verl-0.9.1
    trl       trl/trainer/grpo_trainer.py                                                           of trl-1.16.0
    skyrl     skyrl/backends/skyrl_train/utils/{ppo_utils,off_policy_correction_utils}.py  of SkyRL at a9564572eb8e
    prime-rl  src/prime_rl/trainer/rl/loss.py                                           of prime-rl at 559b44772e47
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.stages.losses.scoring import scored, slope

from penstock.losses import (
    DPPO,
    GMPO,
    KL,
    SAPO,
    VESPO,
    AdvantageWeighted,
    GeometricMask,
    ImportanceWeight,
    Mask,
    OffPolicyMask,
    PPOClip,
    ProductMask,
    Scored,
    Term,
    TokenMask,
    WorstTokenMask,
)

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

LENGTHS = (3, 9, 1, 6, 4)


class Rows(NamedTuple):
    """[B, L] each; 1e3 where nothing trains."""

    new: Floats
    old: Floats
    rollout: Floats
    advantages: Floats
    mask: Floats


def rows(seed: int = 5) -> Rows:
    """Return rows of policies that differ much at some tokens, and whose advantages differ by token."""
    random = np.random.default_rng(seed)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]

    def column(values: Floats) -> Floats:
        return np.where(mask, values, 1e3)

    rollout = -random.gamma(0.7, 1.5, mask.shape)
    old = np.minimum(rollout + 0.3 * random.standard_normal(mask.shape), -1e-3)
    new = np.minimum(old + random.standard_normal(mask.shape), -1e-3)
    return Rows(
        column(new), column(old), column(rollout), column(random.standard_normal(mask.shape)), mask.astype(float)
    )


def made(given: Rows) -> Scored:
    """Return the same tokens as the argument of a loss."""
    kept = given.mask.astype(bool)
    new, old, rollout, advantages = (torch.tensor(column[kept]) for column in given[:4])
    return scored(
        new.requires_grad_(), advantages, lengths=list(LENGTHS), behavior_logprobs=rollout, proximal_logprobs=old
    )


def found(term: Term, given: Rows) -> tuple[Floats, Floats]:
    """Return the values of a term and their derivatives, [T] each."""
    of = made(given)
    values = term.per_token(of).values
    return values.detach().numpy(), slope(values.sum(), of.logprobs).numpy()


# -- DPPO --------------------------------------------------------------------------------------------------------------


def verl_dppo(given: Rows, *, kl: bool, low: float, high: float, c: float) -> tuple[Floats, Floats]:
    """verl core_algos.py:1428-1439 and, with kl, :1515-1523; `old_log_prob` is that of the sampling policy.

    truncated_ratio = torch.clamp(ratio, max=clip_ratio_c)
    …
    valid_positive_mask = (prob - old_prob) <= clip_divergence_high
    valid_negative_mask = (prob - old_prob) >= -clip_divergence_low
    valid_mask = torch.where(advantages > 0, valid_positive_mask, valid_negative_mask)
    …
    binary_kl = old_prob * (old_log_prob - log_prob) + (1 - old_prob) * torch.log(
        (1.0 - old_prob + 1e-8) / (1.0 - prob + 1e-8)
    )
    valid_positive_mask = (binary_kl <= clip_divergence_high) | (prob <= old_prob)
    valid_negative_mask = (binary_kl <= clip_divergence_low) | (prob >= old_prob)
    …
    pg_losses = -advantages * truncated_ratio * log_prob * valid_mask
    """
    new, old, a = (np.where(given.mask, column, -1.0) for column in (given.new, given.rollout, given.advantages))
    weight = np.minimum(np.exp(new - old), c)
    p, q = np.exp(new), np.exp(old)
    if kl:
        d = q * (old - new) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        valid = np.where(a > 0, (d <= high) | (p <= q), (d <= low) | (p >= q))
    else:
        valid = np.where(a > 0, p - q <= high, p - q >= -low)
    return -a * weight * new * valid, -a * weight * valid


def skyrl_dppo(given: Rows, *, kl: bool, low: float, high: float) -> tuple[Floats, Floats]:
    """skyrl ppo_utils.py:905-923; the tokens of `verl_dppo`, with the ratio itself.

    mask[(advantages > 0) & (prob_diff > delta_high)] = 0.0
    mask[(advantages < 0) & (-prob_diff > delta_low)] = 0.0
    …
    mask[(advantages > 0) & (prob_diff > 0) & (binary_kl > delta_high)] = 0.0
    mask[(advantages < 0) & (prob_diff < 0) & (binary_kl > delta_low)] = 0.0
    …
    loss = -(ratio * advantages * mask)
    """
    new, old, a = (np.where(given.mask, column, -1.0) for column in (given.new, given.rollout, given.advantages))
    p, q = np.exp(new), np.exp(old)
    d = q * (old - new) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8)) if kl else abs(p - q)
    cut = ((a > 0) & (p > q) & (d > high)) | ((a < 0) & (p < q) & (d > low))
    values = -np.exp(new - old) * a * ~cut
    return values, values


def prime_rl_dppo(given: Rows, *, low: float, high: float) -> tuple[Floats, Floats]:
    """prime-rl loss.py:130-144, without its second term.

    probs_diff = torch.exp(trainer_logprobs) - torch.exp(inference_logprobs)
    dppo_invalid_mask_high = probs_diff > loss_config.dppo_mask_high
    dppo_invalid_mask_low = probs_diff < -loss_config.dppo_mask_low
    …
    dppo_invalid_mask = torch.where(positive_advantages, dppo_invalid_mask_high, dppo_invalid_mask_low)
    …
    pg_loss = keep_mask * advantages * importance_ratio
    """
    new, old, a = (np.where(given.mask, column, -1.0) for column in (given.new, given.rollout, given.advantages))
    change = np.exp(new) - np.exp(old)
    values = -a * np.exp(new - old) * ~np.where(a > 0, change > high, change < -low)
    return values, values


@pytest.mark.parametrize("kl", [False, True], ids=["tv", "kl"])
@pytest.mark.parametrize("c", [1.5, 20.0])
def test_dppo_has_the_values_and_gradients_of_verl(c: float, *, kl: bool) -> None:
    given = rows()
    kept = given.mask.astype(bool)
    values, gradient = verl_dppo(given, kl=kl, low=0.05, high=0.1, c=c)

    ours = found(DPPO("kl" if kl else "tv", low=0.05, high=0.1, highest=c), given)

    np.testing.assert_allclose(ours[0], values[kept], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours[1], gradient[kept], rtol=1e-12, atol=1e-12)
    assert 2 <= (gradient[kept] == 0).sum() <= kept.sum() - 2


@pytest.mark.parametrize("kl", [False, True], ids=["tv", "kl"])
def test_dppo_has_the_gradients_of_skyrl(*, kl: bool) -> None:
    given = rows(6)

    _, gradient = found(DPPO("kl" if kl else "tv", low=0.1, high=0.05, highest=math.inf), given)

    _, expected = skyrl_dppo(given, kl=kl, low=0.1, high=0.05)
    np.testing.assert_allclose(gradient, expected[given.mask.astype(bool)], rtol=1e-12, atol=1e-12)


def test_a_ratio_without_a_bound_is_that_of_prime_rl_beyond_20_nats() -> None:
    one = np.ones((1, 2))
    given = Rows(new=one * [-3.0, -5.0], old=one, rollout=one * [-30.0, -40.0], advantages=one, mask=one)

    _, gradient = found(DPPO(low=0.1, high=0.1, highest=math.inf), given)

    np.testing.assert_allclose(gradient, prime_rl_dppo(given, low=0.1, high=0.1)[1][0], rtol=1e-12)
    assert gradient[0] == pytest.approx(-math.exp(27))


@pytest.mark.parametrize("above", [0.0, 1e-7])
def test_a_log_probability_that_rounding_brought_above_0_is_masked_as_0_is(above: float) -> None:
    one = np.ones((1, 1))
    given = Rows(new=one * -3.0, old=one, rollout=one * above, advantages=-one, mask=one)

    _, gradient = found(DPPO("kl", low=0.1, high=0.1), given)

    assert gradient.tolist() == [0.0]


def test_dppo_has_the_gradients_of_prime_rl() -> None:
    given = rows(7)

    _, gradient = found(DPPO(low=0.1, high=0.05, highest=math.inf), given)

    np.testing.assert_allclose(
        gradient, prime_rl_dppo(given, low=0.1, high=0.05)[1][given.mask.astype(bool)], rtol=1e-12, atol=1e-12
    )


# -- SAPO --------------------------------------------------------------------------------------------------------------


def sapo(given: Rows, tau_pos: float, tau_neg: float) -> tuple[Floats, Floats]:
    """verl core_algos.py:1659-1681, skyrl ppo_utils.py:625-649, trl grpo_trainer.py:3122-3124, which all agree.

    return torch.sigmoid(tau * (x - 1.0)) * (4.0 / tau)
    …
    taus = torch.where(condition=advantages > 0, input=tau_pos, other=tau_neg)
    …
    pg_losses = -gates * advantages
    """
    new, old, a = (np.where(given.mask, column, -1.0) for column in (given.new, given.rollout, given.advantages))
    ratio, tau = np.exp(new - old), np.where(a > 0, tau_pos, tau_neg)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -gate * 4 / tau * a, -4 * gate * (1 - gate) * ratio * a


@pytest.mark.parametrize(("tau_pos", "tau_neg"), [(1.0, 1.05), (3.0, 0.5)])
def test_sapo_has_the_values_and_gradients_of_verl_skyrl_and_trl(tau_pos: float, tau_neg: float) -> None:
    given = rows()
    kept = given.mask.astype(bool)
    values, gradient = sapo(given, tau_pos, tau_neg)

    ours = found(SAPO(tau_pos, tau_neg), given)

    np.testing.assert_allclose(ours[0], values[kept], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ours[1], gradient[kept], rtol=1e-12, atol=1e-12)


def test_the_gate_of_sapo_is_open_on_policy_and_closes_on_both_sides() -> None:
    def gate(ratio: float) -> float:
        logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64)
        return SAPO()(scored(logprobs, torch.ones(1), behavior_logprobs=torch.zeros(1))).metrics["gate"].value()

    assert gate(1.0) == 1
    assert gate(0.1) < gate(0.5) < 1
    assert gate(9.0) < gate(2.0) < 1


# -- GMPO --------------------------------------------------------------------------------------------------------------


def verl_geo_mean(given: Rows, low: float, high: float) -> tuple[Floats, Floats]:
    """verl core_algos.py:1684-1700 of b178a3cd56f5: the loss, and its derivatives by log π of each token.

    negative_approx_kl_clamp = torch.clamp(negative_approx_kl, -cliprange_low, cliprange_high)
    negative_approx_kl_min = torch.min(sgn_advantage * negative_approx_kl, sgn_advantage * negative_approx_kl_clamp)
    negative_approx_kl_min = sgn_advantage * negative_approx_kl_min
    ratio = torch.exp((negative_approx_kl_min * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8))
    advantage = (advantages * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8)
    pg_losses = -advantage * ratio
    …
    pg_loss = torch.mean(pg_losses)
    """
    sign, change = np.sign(given.advantages), np.where(given.mask, given.new - given.rollout, 0.0)
    clamped = np.clip(change, -low, high)
    within = sign * np.minimum(sign * change, sign * clamped)
    count = given.mask.sum(1)
    ratio = np.exp((within * given.mask).sum(1) / count)
    advantage = (given.advantages * given.mask).sum(1) / count
    moves = (sign * change <= sign * clamped) & given.mask.astype(bool)
    return -(advantage * ratio).mean(), -(advantage * ratio / count)[:, None] * moves / len(count)


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 2.0), (9.0, 9.0)])
def test_gmpo_has_the_value_and_gradients_of_verl(low: float, high: float) -> None:
    given = rows(3)
    of_sequence = np.array([[1.0], [-1.0], [0.5], [-2.0], [0.3]])
    given = given._replace(advantages=np.where(given.mask, of_sequence, 1e3))
    value, gradient = verl_geo_mean(given, low, high)
    of = made(given)

    loss = GMPO(low, high).aggregated("seq-mean-token-mean")(of).loss

    assert loss.item() == pytest.approx(float(value), rel=1e-12)
    np.testing.assert_allclose(slope(loss, of.logprobs), gradient[given.mask.astype(bool)], rtol=1e-12, atol=1e-14)


# -- VESPO -------------------------------------------------------------------------------------------------------------


def trl_vespo(given: Rows, positive: tuple[float, float], negative: tuple[float, float]) -> tuple[Floats, Floats]:
    """trl grpo_trainer.py:2966-2989 and :3106 of f2cd57710ae3, `old` being the policy that sampled.

    log_ratio_clamped = torch.clamp(log_ratio_per_token, -20.0, 20.0)
    seq_log_ratio = torch.sum(log_ratio_clamped * mask, dim=-1, keepdim=True)  # (B, 1)
    log_w_seq = torch.clamp(seq_log_ratio, lower_clamp, 20.0)
    w_seq = torch.exp(log_w_seq)
    k_seq = torch.where(is_nonneg_adv, k_pos, k_neg)
    lambda_seq = torch.where(is_nonneg_adv, lambda_pos, lambda_neg).clamp(min=1e-4)
    log_phi = lambda_seq + k_seq * log_w_seq - lambda_seq * w_seq
    phi_seq = torch.exp(log_phi).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    …
    per_token_loss = -phi_seq * advantages * per_token_logps
    """
    change = np.clip(np.where(given.mask, given.new - given.rollout, 0.0), -20, 20)
    log_w = np.clip(change.sum(1, keepdims=True), math.log(1e-8), 20)
    k, rate = (np.where(given.advantages >= 0, positive[each], negative[each]) for each in range(2))
    phi = np.exp(rate + k * log_w - rate * np.exp(log_w))
    return -phi * given.advantages * given.new, -phi * given.advantages


@pytest.mark.parametrize(("positive", "negative"), [((2.0, 3.0), (3.0, 2.0)), ((0.5, 0.1), (1.0, 1.0))])
@pytest.mark.parametrize("seed", range(3))
def test_vespo_has_the_values_and_gradients_of_trl(
    positive: tuple[float, float], negative: tuple[float, float], seed: int
) -> None:
    given = rows(seed)
    kept = given.mask.astype(bool)
    values, gradient = trl_vespo(given, positive, negative)

    ours = found(VESPO(positive[0], positive[1], negative[0], negative[1]), given)

    np.testing.assert_allclose(ours[0], values[kept], rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(ours[1], gradient[kept], rtol=1e-12, atol=1e-300)


def test_the_weight_of_vespo_is_1_on_policy_and_0_at_extremes() -> None:
    def phi(log_ratio: float) -> float:
        logprobs = torch.full((2,), -50.0, dtype=torch.float64)
        given = scored(logprobs, torch.ones(2), behavior_logprobs=logprobs - log_ratio)
        return VESPO().per_token(given).metrics["phi"].value()

    assert phi(0.0) == 1
    assert phi(-0.2) == pytest.approx(math.exp(3 - 0.8 - 3 * math.exp(-0.4)))  # about the highest, w = 2/3
    assert phi(-0.2) > 1
    assert phi(0.02) < 1
    assert 1 > phi(-5.0) > 0
    assert phi(40.0) == 0


# -- KL ----------------------------------------------------------------------------------------------------------------


def compared(given: Rows) -> Scored:
    """Return the same tokens with `old` as the reference, and `rollout` as the sampling policy."""
    of = made(given)
    return replace(of, ref_logprobs=of.proximal())


def test_a_kl_with_the_gradient_of_k2_has_the_values_and_gradients_of_verl() -> None:
    """verl core_algos.py:1857-1864 of b178a3cd56f5, within its clamp at 10.

    backward_score = 0.5 * (logprob - ref_logprob).square()
    return backward_score - backward_score.detach() + forward_score.detach()
    """
    given = rows()
    kept = given.mask.astype(bool)
    change = (given.new - given.old)[kept]
    values = {"k1+": change, "k3+": np.exp(-change) + change - 1}

    for estimator, expected in values.items():
        of = compared(given)
        estimate = KL(estimator).per_token(of).values  # type: ignore[arg-type]
        np.testing.assert_allclose(estimate.detach(), expected, rtol=1e-12)
        np.testing.assert_allclose(slope(estimate.sum(), of.logprobs), change, rtol=1e-12)


def test_an_unbiased_kl_has_the_values_and_gradients_of_trl() -> None:
    """trl grpo_trainer.py:3069-3076 of f2cd57710ae3, with the sampling policy as the old one.

    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    if self.args.use_bias_correction_kl:
        per_token_kl = per_token_kl * coef_1
    """
    given = rows()
    kept = given.mask.astype(bool)
    change, ratio = (given.new - given.old)[kept], np.exp(given.new - given.rollout)[kept]
    k3 = np.exp(-change) + change - 1
    of = compared(given)

    estimate = KL("k3", unbiased="behavior").per_token(of).values

    np.testing.assert_allclose(estimate.detach(), k3 * ratio, rtol=1e-12)
    slopes = ratio * (1 - np.exp(-change)) + ratio * k3
    np.testing.assert_allclose(slope(estimate.sum(), of.logprobs), slopes, rtol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_over_all_tokens_an_unbiased_kl_is_the_divergence_and_its_gradient_that_of_it(estimator: Any) -> None:
    """Each token of a vocabulary of five, weighted by how often the old policy samples it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    old = torch.log_softmax(torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2], dtype=torch.float64), -1)
    reference = torch.log_softmax(torch.tensor([0.0, 0.4, 0.2, -0.7, 0.9], dtype=torch.float64), -1)
    now = torch.log_softmax(logits, -1)
    divergence = (now.exp() * (now - reference)).sum()

    of = scored(now, torch.zeros(5), behavior_logprobs=old, ref_logprobs=reference)
    estimate = (old.exp() * KL(estimator, unbiased="behavior").per_token(of).values).sum()

    assert estimate.item() == pytest.approx(divergence.item(), rel=1e-12)
    expected = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], expected)


# -- masks of sequences ------------------------------------------------------------------------------------------------


def skyrl_geometric(given: Rows, low: float, high: float) -> Flags:
    """skyrl off_policy_correction_utils.py:222-228.

    num_tokens = loss_mask.sum(dim=-1, keepdim=True).clamp(min=1.0)
    seq_tis_log_ratio = (token_tis_log_ratio * loss_mask).sum(dim=-1, keepdim=True)
    geo_mean_ratio = safe_exp_delta(seq_tis_log_ratio / num_tokens, clip=20.0, …)
    seq_over_high = geo_mean_ratio > geo_cap_high
    seq_under_low = geo_mean_ratio < geo_cap_low
    """
    mean = np.exp(((given.old - given.rollout) * given.mask).sum(1) / given.mask.sum(1))
    kept: Flags = (mean >= low) & (mean <= high)
    return kept


def verl_seq_mean_k1(given: Rows, lower: float, upper: float) -> Flags:
    """verl rollout_corr_helper.py:263, :304-305 and :348-349.

    token_k1: torch.Tensor = -log_ratio_safe
    lower_log = math.log(lower_value)
    upper_log = math.log(upper_value)
    seq_stat = _sequence_mean(token_k1)
    seq_keep_bool_direct = (seq_stat >= lower_log) & (seq_stat <= upper_log)
    """
    k1 = (-(given.old - given.rollout) * given.mask).sum(1) / given.mask.sum(1)
    kept: Flags = (k1 >= math.log(lower)) & (k1 <= math.log(upper))
    return kept


def skyrl_outlier(given: Rows, low: float, high: float) -> Flags:
    """skyrl off_policy_correction_utils.py:108-121.

    token_over_high = (token_tis_ratio > token_mask_high) & (loss_mask > 0)
    token_under_low = (token_tis_ratio < token_mask_low) & (loss_mask > 0)
    token_in_bounds = ~token_over_high & ~token_under_low
    all_tokens_valid = (token_in_bounds | (loss_mask == 0)).all(dim=-1, keepdim=True)
    """
    ratio = np.exp(np.where(given.mask, given.old - given.rollout, 0.0))
    kept: Flags = np.all((ratio >= low) & (ratio <= high), axis=1)
    return kept


def verl_seq_max_k2(given: Rows, upper: float) -> Flags:
    """verl rollout_corr_helper.py:264 and :363-364.

    token_k2: torch.Tensor = 0.5 * log_ratio_safe**2
    seq_stat = _sequence_max(token_k2)
    seq_keep_bool_direct = seq_stat <= upper_value
    """
    k2 = 0.5 * np.where(given.mask, given.old - given.rollout, 0.0) ** 2
    kept: Flags = k2.max(1) <= upper
    return kept


def skyrl_product(given: Rows, low: float, high: float) -> Flags:
    """skyrl off_policy_correction_utils.py:239-246.

    seq_tis_ratio = safe_exp_delta(seq_tis_log_ratio, clip=20.0, …)
    seq_over_high = seq_tis_ratio > seq_cap_high
    seq_under_low = seq_tis_ratio < seq_cap_low
    """
    product = np.exp(((given.old - given.rollout) * given.mask).sum(1))
    kept: Flags = (product >= low) & (product <= high)
    return kept


def verl_token_k1(given: Rows, lower: float, upper: float) -> Flags:
    """verl rollout_corr_helper.py:271-275 of b178a3cd56f5.

    token_k1: torch.Tensor = -log_ratio_safe
    token_keep_bool = (per_token_stat >= lower_log) & (per_token_stat <= upper_log)
    """
    k1 = -(given.old - given.rollout)
    kept: Flags = (k1 >= math.log(lower)) & (k1 <= math.log(upper))
    return kept


@pytest.mark.parametrize("seed", range(5))
def test_a_token_mask_keeps_the_tokens_that_verl_keeps(seed: int) -> None:
    given = rows(seed)
    term = PPOClip(old="proximal")

    values, _ = found(term * TokenMask(1 / 1.2, 1 / 0.8), given)

    keeps = verl_token_k1(given, 0.8, 1.2)[given.mask.astype(bool)]
    np.testing.assert_array_equal(values, found(term, given)[0] * keeps)
    assert 0 < keeps.sum() < len(keeps)


def test_a_weight_of_the_geometric_mean_is_that_of_the_sequence_and_does_not_grow_with_its_length() -> None:
    given = rows()
    term = PPOClip(old="proximal")
    mean = np.exp(((given.old - given.rollout) * given.mask).sum(1) / given.mask.sum(1))

    values, _ = found(term * ImportanceWeight(high=1.1, level="geometric"), given)

    weights = np.minimum(mean, 1.1).repeat(LENGTHS)
    np.testing.assert_allclose(values, found(term, given)[0] * weights, rtol=1e-12)
    assert 0 < (mean > 1.1).sum() < len(mean)


MASKS: list[tuple[Mask, Callable[[Rows], Flags]]] = [
    (GeometricMask(0.9, 1.2), lambda given: skyrl_geometric(given, 0.9, 1.2)),
    (GeometricMask(1 / 1.2, 1 / 0.9), lambda given: verl_seq_mean_k1(given, 0.9, 1.2)),
    (ProductMask(0.7, 1.6), lambda given: skyrl_product(given, 0.7, 1.6)),
    (WorstTokenMask(0.6, 1.7), lambda given: skyrl_outlier(given, 0.6, 1.7)),
    (
        WorstTokenMask(math.exp(-math.sqrt(2 * 0.15)), math.exp(math.sqrt(2 * 0.15))),
        lambda given: verl_seq_max_k2(given, 0.15),
    ),
]


@pytest.mark.parametrize(("mask", "keeps"), MASKS, ids=["geo", "seq_mean_k1", "product", "outlier", "seq_max_k2"])
@pytest.mark.parametrize("seed", range(5))
def test_a_mask_keeps_the_sequences_that_the_library_keeps(
    mask: Mask, keeps: Callable[[Rows], Flags], seed: int
) -> None:
    given = rows(seed)
    term = PPOClip(old="proximal")

    values, _ = found(term * mask, given)

    expected = found(term, given)[0] * keeps(given).repeat(LENGTHS)
    np.testing.assert_array_equal(values, expected)


def test_the_masks_that_are_compared_keep_some_sequences_and_not_others() -> None:
    for _, keeps in MASKS:
        kept = np.concatenate([keeps(rows(seed)) for seed in range(5)])
        assert 0 < kept.sum() < len(kept)


def trl_off_policy_mask(given: Rows, threshold: float) -> Flags:
    """trl grpo_trainer.py:2957-2968, with advantages of tokens, [B, L].

    kl_div = sampling_per_token_logps - per_token_logps.detach()
    seq_kl_sum = (kl_div * mask).sum(dim=1, keepdim=True)
    avg_seq_kl = seq_kl_sum / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    is_pos_adv = advantages >= 0
    is_low_kl = avg_seq_kl <= off_policy_threshold
    return (is_pos_adv | is_low_kl).to(dtype=mask.dtype)  # (B, 1)
    """
    mean = ((given.rollout - given.new) * given.mask).sum(1, keepdims=True) / given.mask.sum(1, keepdims=True)
    kept: Flags = (given.advantages >= 0) | (mean <= threshold)
    return kept


@pytest.mark.parametrize("by_token", [False, True], ids=["one advantage", "advantages of tokens"])
def test_the_off_policy_mask_is_that_of_trl(*, by_token: bool) -> None:
    given = rows(2)
    if not by_token:
        given = given._replace(advantages=np.repeat(np.array([[1.0], [-1], [-0.5], [-2], [0.3]]), 9, axis=1))
    kept = given.mask.astype(bool)

    values, _ = found(PPOClip() * OffPolicyMask(0.1), given)

    keeps = trl_off_policy_mask(given, 0.1)[kept]
    np.testing.assert_array_equal(values, found(PPOClip(), given)[0] * keeps)
    assert 0 < keeps.sum() < len(keeps)


def test_masks_and_a_weight_multiply_and_each_reports_its_share() -> None:
    given = made(rows())
    weighted = PPOClip(old="proximal") * ImportanceWeight()
    masks = (GeometricMask(0.9, 1.2), WorstTokenMask(0.7, 1.4))

    loss = weighted * masks[0] * masks[1]
    values, metrics = loss.per_token(given)

    kept = (weighted * masks[0]).per_token(given).values * ((weighted * masks[1]).per_token(given).values != 0)
    torch.testing.assert_close(values, kept)
    assert {"importance/mean", "masked/geometric", "masked/worst_token", "pg_clipfrac"} <= metrics.keys()
    share = (~skyrl_outlier(rows(), 0.7, 1.4)).repeat(LENGTHS).mean()
    assert metrics["masked/worst_token"].value() == pytest.approx(share)
    assert 0 < share < 1
    assert repr(loss) == f"{weighted!r} * {masks[0]!r} * {masks[1]!r}"


def test_tokens_of_a_masked_sequence_still_count_in_the_mean() -> None:
    given = made(rows())

    loss = (PPOClip() * WorstTokenMask(0.7, 1.4))(given).loss

    kept = found(PPOClip(), rows())[0][skyrl_outlier(rows(), 0.7, 1.4).repeat(LENGTHS)]
    assert loss.item() == pytest.approx(kept.sum() / sum(LENGTHS))
    assert 0 < len(kept) < sum(LENGTHS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DPPO("js"),  # type: ignore[arg-type]
        lambda: DPPO(low=0),
        lambda: DPPO(high=math.nan),
        lambda: DPPO(highest=1.0),
        lambda: SAPO(tau_pos=0),
        lambda: SAPO(tau_neg=math.inf),
        lambda: GeometricMask(1.01, 0.99),
        lambda: WorstTokenMask(0.0, math.inf),
        lambda: ProductMask(1.0, 2.0),
        lambda: TokenMask(0.5, math.nan),
        lambda: GMPO(clip_low=0),
        lambda: GMPO(old="other"),  # type: ignore[arg-type]
        lambda: VESPO(lambda_neg=0),
        lambda: VESPO(k_pos=math.inf),
        lambda: KL("k2", unbiased="behavior"),
        lambda: KL("k3+", unbiased="proximal"),
        lambda: KL("k4"),  # type: ignore[arg-type]
        lambda: OffPolicyMask(0.0),
    ],
)
def test_numbers_that_bound_nothing_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_a_regularisation_term_is_not_masked() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = (PPOClip() + AdvantageWeighted()) * GeometricMask()  # type: ignore[operator]
