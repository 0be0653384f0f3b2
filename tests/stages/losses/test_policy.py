from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.stages.losses.scoring import random, scored, slope
from torch import Tensor

from penstock.errors import InvalidRecord
from penstock.losses import CISPO, GSPO, AdvantageWeighted, Loss, PPOClip, Term

PPO = PPOClip(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def one_token(ratio: float, advantage: float, loss: Loss) -> tuple[float, float]:
    """Return the loss of one token with that ratio, and its derivative with respect to log π."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value = loss(scored(logprobs, torch.tensor([advantage]), behavior_logprobs=torch.zeros(1))).loss
    return value.item(), slope(value, logprobs).item()


def metric(
    loss: Loss, ratios: list[float], advantages: list[float], name: str, lengths: list[int] | None = None
) -> float:
    logprobs = torch.log(torch.tensor(ratios, dtype=torch.float64))
    given = scored(logprobs, torch.tensor(advantages), lengths=lengths, behavior_logprobs=torch.zeros(len(ratios)))
    return loss(given).metrics[name].value()


# -- advantage-weighted ------------------------------------------------------------------------------------------------


def test_the_advantage_weighted_loss_is_minus_the_mean_of_advantage_times_log_probability() -> None:
    given = scored(torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -1.0]))

    assert AdvantageWeighted()(given).loss.item() == pytest.approx(-(3 * -1 + -1 * -2) / 2)


# -- ppo ---------------------------------------------------------------------------------------------------------------


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
    loss, derivative = one_token(ratio, advantage, PPO)

    assert loss == pytest.approx(value)
    assert derivative == pytest.approx(-ratio * advantage if moves else 0)


@pytest.mark.parametrize("ratio", [0.37, 2.7])
def test_the_trust_region_of_bad_tokens_is_not_the_wrong_way_round(ratio: float) -> None:
    """With max(r A, clip(r) A) for A < 0, a bad token would be pushed on where it is unlikely and let go where it is
    likely: derivatives of 0.37 and 0 here, instead of 0 and 2.7."""
    _, derivative = one_token(ratio, -1.0, PPOClip(clip_low=0.2, clip_high=0.2))

    assert derivative == pytest.approx(ratio if ratio > 1 else 0)


@pytest.mark.parametrize("advantage", [-1.3, 0.7])
@pytest.mark.parametrize("bound", [1 - 0.2, 1 + 0.28, 3.0])
@pytest.mark.parametrize("side", [-1, 1])
def test_ppo_agrees_with_finite_differences_on_both_sides_of_every_bound(
    advantage: float, bound: float, side: int
) -> None:
    step, ratio = 1e-6, bound * math.exp(side * 1e-3)

    higher, lower = (one_token(ratio * math.exp(each), advantage, PPO)[0] for each in (step, -step))

    assert one_token(ratio, advantage, PPO)[1] == pytest.approx((higher - lower) / (2 * step), abs=1e-6)


def test_without_a_dual_clip_a_bad_token_that_became_likelier_is_pushed_without_bound() -> None:
    assert one_token(50.0, -1.0, PPOClip())[0] == pytest.approx(50)


def test_clip_fractions_are_reported_for_each_bound() -> None:
    ratios, advantages = [1.0, 1.5, 0.5, 0.5, 4.0, 9.0, 9.0, 1.5], [1.0, 1, 1, -1, -1, 1, 1, -1]

    found = {name: metric(PPO, ratios, advantages, f"pg_clipfrac{name}") * 8 for name in ("", "/low", "/high", "/dual")}

    assert found == pytest.approx({"": 5, "/low": 1, "/high": 3, "/dual": 1})


def test_ratios_that_overflow_stay_finite() -> None:
    given = scored(torch.zeros(1), -torch.ones(1), behavior_logprobs=torch.full((1,), -500.0))

    assert PPOClip()(given).loss.item() == pytest.approx(math.exp(20), rel=1e-5)


# -- gspo --------------------------------------------------------------------------------------------------------------


def test_the_ratio_of_gspo_is_the_geometric_mean_over_the_sequence() -> None:
    given = random(lengths=(2, 3))
    assert given.behavior_logprobs is not None
    apart = given.logprobs - given.behavior_logprobs
    ratios = [apart[:2].mean().exp().item()] * 2 + [apart[2:].mean().exp().item()] * 3
    expected = [-min(r * a, min(max(r, 0.9), 1.2) * a) for r, a in zip(ratios, given.advantage().tolist(), strict=True)]

    values = GSPO(clip_low=0.1, clip_high=0.2, old="behavior").per_token(given).values

    assert values.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("log_ratios", "log_mean"), [([-50.0, 20.0, 25.0, 1.0], -1.0), ([30.0, 34.0], 20.0)])
def test_the_ratio_of_gspo_is_bounded_as_a_whole_and_stays_finite(log_ratios: list[float], log_mean: float) -> None:
    apart = torch.tensor(log_ratios, dtype=torch.float64)
    given = scored(apart, torch.full_like(apart, -1.0), behavior_logprobs=torch.zeros(len(apart)))

    values = GSPO(clip_low=0.9, clip_high=0.2, old="behavior").per_token(given).values

    assert values.tolist() == pytest.approx([math.exp(log_mean)] * len(apart))


def test_the_gradient_of_gspo_is_each_tokens_own() -> None:
    given = random(lengths=(2,))
    logprobs = given.logprobs.clone().requires_grad_()
    wide = GSPO(clip_low=0.99, clip_high=9.0, old="behavior")

    gradient = slope(wide(replace(given, logprobs=logprobs)).loss, logprobs)

    assert given.behavior_logprobs is not None
    ratio = (given.logprobs - given.behavior_logprobs).mean().exp()
    torch.testing.assert_close(gradient, -ratio * given.advantage() / 2)


def test_gspo_clips_whole_sequences() -> None:
    ratios, advantages = [4.0, 0.5, 1.0, 1.0], [1.0] * 4

    assert metric(GSPO(old="behavior"), ratios, advantages, "pg_clipfrac/high", lengths=[2, 2]) == 0.5


@pytest.mark.parametrize(("nats", "share"), [(0.01, 0.27), (0.02, 0.36), (0.05, 0.42)])
def test_gspo_clips_nothing_on_policy_and_would_clip_the_noise_of_an_engine(nats: float, share: float) -> None:
    """2,048 sequences of 400 tokens whose log-probabilities an engine computed otherwise by so many nats a token."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(2048 * 400, generator=generator, dtype=torch.float64)
    apart = nats * torch.randn(2048 * 400, generator=generator, dtype=torch.float64)
    advantages = torch.randn(2048, generator=generator, dtype=torch.float64).repeat_interleave(400)
    given = scored(logprobs, advantages, lengths=[400] * 2048, behavior_logprobs=logprobs + apart)

    clipped = {old: GSPO(old=old)(given).metrics["pg_clipfrac"].value() for old in ("behavior", "proximal")}

    assert clipped["behavior"] == pytest.approx(share, abs=0.04)
    assert clipped["proximal"] == 0
    assert GSPO() == GSPO(old="proximal")


# -- cispo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [-1.3, 0.7])
@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.5), (1.5, 1.5), (9.0, 3.0)])
def test_cispo_is_advantage_weighted_by_a_bounded_number(ratio: float, weight: float, advantage: float) -> None:
    loss, derivative = one_token(ratio, advantage, CISPO(lowest=0.5, highest=3.0))

    assert (loss, derivative) == pytest.approx((-weight * advantage * math.log(ratio), -weight * advantage))


def test_cispo_reports_clipped_tokens_of_either_sign() -> None:
    found = [metric(CISPO(0.5, 3.0), [0.1, 9, 9, 1], [1.0, 1, -1, 1], f"pg_clipfrac/{end}") for end in ("low", "high")]

    assert found == [0.25, 0.5]


# -- invalid arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [PPOClip(), GSPO(old="behavior"), CISPO()], ids=repr)
def test_a_ratio_without_behavior_logprobs_names_the_remedy(loss: Term) -> None:
    with pytest.raises(InvalidRecord, match="behavior_logprobs: expected a column, got none: have the sampler record"):
        loss(scored(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize("make", [PPOClip, GSPO, CISPO])
def test_against_the_proximal_policy_no_behavior_logprobs_are_needed(make: Callable[..., Term]) -> None:
    logprobs = torch.zeros(1, requires_grad=True)

    value = make(old="proximal")(scored(logprobs, torch.ones(1))).loss

    assert slope(value, logprobs).item() == -1


@pytest.mark.parametrize(
    "make",
    [
        lambda: PPOClip(clip_low=1.2),
        lambda: PPOClip(clip_low=0),
        lambda: PPOClip(clip_high=-0.2),
        lambda: PPOClip(dual_clip=1.0),
        lambda: PPOClip(dual_clip=math.nan),
        lambda: PPOClip(clip_high=math.nan),
        lambda: GSPO(clip_high=0),
        lambda: CISPO(lowest=1.2),
        lambda: CISPO(highest=0.28),
    ],
)
def test_bounds_that_bound_nothing_are_refused(make: Callable[[], Term]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_the_first_update_and_a_later_one_from_the_same_weights_are_equal() -> None:
    given = random()

    def gradient(proximal: Tensor | None) -> Tensor:
        logprobs = given.logprobs.clone().requires_grad_()
        moved = replace(given, logprobs=logprobs, proximal_logprobs=proximal)
        return slope(PPOClip(old="proximal")(moved).loss, logprobs)

    torch.testing.assert_close(gradient(None), gradient(given.logprobs))
