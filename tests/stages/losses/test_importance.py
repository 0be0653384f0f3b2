from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stages.losses.scoring import random, scored, slope

from penstock.errors import InvalidRecord
from penstock.losses import CISPO, GSPO, AdvantageWeighted, ImportanceWeight, Loss, PPOClip


def weights(weight: ImportanceWeight, ratios: list[list[float]]) -> list[float]:
    """Return the weights of the tokens of sequences with these ratios π/π_behavior."""
    flat = torch.tensor([ratio for sequence in ratios for ratio in sequence], dtype=torch.float64)
    given = scored(
        flat.log(),
        -1 / flat.log().where(flat != 1, math.nan),  # so that −A log π is 1
        lengths=[len(sequence) for sequence in ratios],
        behavior_logprobs=torch.zeros(len(flat)),
    )
    return (AdvantageWeighted() * weight).per_token(given).values.tolist()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (ImportanceWeight(high=math.inf), [0.5, 1.5, 4.0, 0.2]),
        (ImportanceWeight(high=2.0), [0.5, 1.5, 2.0, 0.2]),
        (ImportanceWeight(high=2.0, low=0.4), [0.5, 1.5, 2.0, 0.4]),
        (ImportanceWeight(high=2.0, beyond="mask"), [0.5, 1.5, 0.0, 0.2]),
        (ImportanceWeight(high=2.0, low=0.4, beyond="mask"), [0.5, 1.5, 0.0, 0.0]),
        (ImportanceWeight(high=math.inf, level="sequence"), [3.0, 3.0, 3.0, 0.2]),
        (ImportanceWeight(high=2.0, level="sequence"), [2.0, 2.0, 2.0, 0.2]),
        (ImportanceWeight(high=2.0, low=0.4, level="sequence", beyond="mask"), [0.0, 0.0, 0.0, 0.0]),
        (ImportanceWeight(high=4.0, low=0.4, level="sequence", beyond="mask"), [3.0, 3.0, 3.0, 0.0]),
    ],
    ids=repr,
)
def test_the_weights_of_each_form(weight: ImportanceWeight, expected: list[float]) -> None:
    assert weights(weight, [[0.5, 1.5, 4.0], [0.2]]) == pytest.approx(expected)


@pytest.mark.parametrize(("log_ratios", "total"), [([-45.0, 12.0, 12.0, 22.0], 1.0), ([-45.0], -20), ([15.0] * 9, 20)])
def test_the_ratio_of_a_sequence_is_bounded_as_a_whole_and_stays_finite(log_ratios: list[float], total: float) -> None:
    apart = torch.tensor(log_ratios, dtype=torch.float64)
    given = scored(apart, -1 / apart, behavior_logprobs=torch.zeros(len(apart)))

    values = (AdvantageWeighted() * ImportanceWeight(high=math.inf, level="sequence")).per_token(given).values

    assert values.tolist() == pytest.approx([math.exp(total)] * len(apart))


def test_no_gradient_flows_through_the_weight() -> None:
    logprobs = torch.tensor([math.log(1.5)], requires_grad=True)
    given = scored(logprobs, torch.tensor([2.0]), behavior_logprobs=torch.zeros(1))

    assert slope((AdvantageWeighted() * ImportanceWeight())(given).loss, logprobs).item() == pytest.approx(-1.5 * 2)


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_what_that_differs_from_the_sampling_one() -> (
    None
):
    ratio, proximal_to_behavior, advantage = 1.1, 1.8, 0.7
    given = scored(
        torch.tensor([math.log(ratio * proximal_to_behavior)]),
        torch.tensor([advantage]),
        behavior_logprobs=torch.zeros(1),
        proximal_logprobs=torch.tensor([math.log(proximal_to_behavior)]),
    )

    decoupled = (PPOClip(old="proximal") * ImportanceWeight(high=math.inf))(given)
    coupled = PPOClip()(given)

    assert decoupled.loss.item() == pytest.approx(-proximal_to_behavior * ratio * advantage)
    assert decoupled.metrics["pg_clipfrac"].value() == 0
    assert coupled.metrics["pg_clipfrac"].value() == 1


def test_masked_tokens_still_count_in_the_denominator_of_the_mean() -> None:
    given = scored(torch.log(torch.tensor([1.5, 9.0])), torch.ones(2), behavior_logprobs=torch.zeros(2))

    loss = (AdvantageWeighted() * ImportanceWeight(high=2.0, beyond="mask"))(given).loss

    assert loss.item() == pytest.approx(-1.5 * math.log(1.5) / 2)


def test_metrics_describe_the_weights_before_they_are_bounded() -> None:
    ratios = torch.tensor([0.2, 1.0, 1.0, 4.0], dtype=torch.float64)
    given = scored(ratios.log(), torch.ones(4), behavior_logprobs=torch.zeros(4))

    metrics = (AdvantageWeighted() * ImportanceWeight(high=2.0, low=0.5))(given).metrics

    assert {name: metric.value() for name, metric in metrics.items()} == pytest.approx(
        {
            "importance/mean": 1.55,
            "importance/max": 4.0,
            "importance/min": 0.2,
            "importance/low": 0.25,
            "importance/high": 0.25,
            "importance/effective_sample_size": 1.55**2 / ((0.04 + 1 + 1 + 16) / 4),
        }
    )


@pytest.mark.parametrize("term", [PPOClip(), GSPO(old="behavior"), CISPO()], ids=repr)
def test_a_ratio_to_the_sampling_policy_is_not_weighted_once_more(term: Any) -> None:
    with pytest.raises(ValueError, match=r"a weight would correct twice. Use old=\"proximal\", or omit the weight"):
        _ = term * ImportanceWeight()


def test_a_term_is_weighted_once() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = AdvantageWeighted() * ImportanceWeight() * ImportanceWeight()  # type: ignore[operator]


def test_a_weight_without_behavior_logprobs_names_the_remedy() -> None:
    with pytest.raises(InvalidRecord, match="behavior_logprobs: expected a column, got none"):
        (AdvantageWeighted() * ImportanceWeight())(scored(torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ImportanceWeight(high=0.9),
        lambda: ImportanceWeight(low=1.1),
        lambda: ImportanceWeight(low=-0.1),
        lambda: ImportanceWeight(high=1.0, low=1.0),
        lambda: ImportanceWeight(high=math.inf, beyond="mask"),
        lambda: ImportanceWeight(level="group"),  # type: ignore[arg-type]
        lambda: ImportanceWeight(beyond="drop"),  # type: ignore[arg-type]
    ],
)
def test_weights_that_make_no_sense_are_refused(make: Callable[[], ImportanceWeight]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


def test_a_weight_of_one_changes_nothing() -> None:
    given = random()
    given = scored(given.logprobs, given.advantage(), behavior_logprobs=given.logprobs, lengths=given.lengths.tolist())

    weighted: Loss = PPOClip(old="proximal") * ImportanceWeight()

    torch.testing.assert_close(weighted(given).loss, PPOClip(old="proximal")(given).loss)
