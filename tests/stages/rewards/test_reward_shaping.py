from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._schemas.config import parse_config
from penstock._stages.rewards.reward_shaping import (
    LengthBounty,
    RewardConfig,
    Shaped,
    bounty_of_lengths,
    combined,
    reward_of_format,
)
from penstock.errors import InvalidConfig

fewer = settings(max_examples=100)


def pays(markers: list[dict[str, Any]], *turns: str, ordered: bool = False) -> float:
    config = parse_config(RewardConfig, {"format_markers": markers, "ordered": ordered})
    return reward_of_format(turns, config)


THINK = {"marker": "<think>", "closing": "</think>", "reward": 1}
ANSWER = {"marker": "<answer>", "closing": "</answer>", "reward": 10}


def test_a_marker_pays_once_for_any_number_of_occurrences() -> None:
    assert pays([{"marker": "so", "reward": 0.5}], "so and so and so") == 0.5


@pytest.mark.parametrize(
    ("marker", "reward", "text", "paid"), [("so", 0.5, "so and so and so", 1.5), ("aa", 1, "aaaa a aaa", 3)]
)
def test_a_marker_that_is_counted_each_time_pays_for_each_occurrence_without_overlap(
    marker: str, reward: float, text: str, paid: float
) -> None:
    assert pays([{"marker": marker, "reward": reward, "counted": "each"}], text) == paid


def test_an_absent_marker_pays_nothing() -> None:
    assert pays([{"marker": "so", "reward": 0.5}], "") == 0
    assert pays([{"marker": "so", "reward": 0.5}]) == 0


def test_a_marker_without_its_closing_pays_nothing() -> None:
    assert pays([THINK], "<think>hm") == 0
    assert pays([THINK], "</think><think>hm") == 0
    assert pays([THINK], "<think>hm</think>") == 1


def test_each_closing_closes_one_marker() -> None:
    each = THINK | {"counted": "each"}

    assert pays([each], "<think>a<think>b</think>") == 1
    assert pays([each], "<think>a</think> <think>b</think> <think>c") == 2


def test_without_an_order_markers_pay_wherever_they_stand() -> None:
    assert pays([THINK, ANSWER], "<answer>4</answer><think>2+2</think>") == 11


def test_in_order_a_marker_before_one_listed_earlier_pays_nothing() -> None:
    assert pays([THINK, ANSWER], "<think>2+2</think><answer>4</answer>", ordered=True) == 11
    assert pays([THINK, ANSWER], "<answer>4</answer><think>2+2</think>", ordered=True) == 1
    assert pays([THINK, ANSWER], "<think><answer>4</answer></think>", ordered=True) == 1


def test_in_order_a_missing_marker_holds_up_none_after_it() -> None:
    assert pays([THINK, ANSWER], "<answer>4</answer>", ordered=True) == 10


def test_a_marker_may_be_closed_in_a_later_turn() -> None:
    assert pays([THINK], "<think>hm", "ah</think>") == 1


def test_no_marker_is_made_of_two_turns() -> None:
    assert pays([{"marker": "<think>", "reward": 1}], "<thi", "nk>") == 0


def test_length_is_paid_or_charged_by_the_unit_up_to_the_cap() -> None:
    lengths = np.array([0, 3, 1000])

    assert bounty_of_lengths(lengths, LengthBounty(reward=0.5, cap=2)).tolist() == [0, 1.5, 2]
    assert bounty_of_lengths(lengths, LengthBounty(reward=-0.5, cap=2)).tolist() == [0, -1.5, -2]


def shaped(scores: Sequence[float], config: RewardConfig, component: Sequence[float] | None = None) -> Shaped:
    """Return scores without noise of their own, and with one component, `a`, or none."""
    components = {} if component is None else {"a": np.array(component)}
    return combined(np.array(scores), np.zeros(len(scores)), components, config)


def test_added_components_apply_to_every_answer() -> None:
    parts = shaped([0.0, 1.0], RewardConfig(), [0.5, 0.25]).parts

    assert {name: part.tolist() for name, part in parts.items()} == {"a": [0.5, 0.25]}


def test_a_fallback_applies_to_failed_answers_and_stops_at_right_ones() -> None:
    scores, shaping = [0.0, 0.9, 1.0, 2.0], [0.5, 0.5, 0.5, 0.5]

    parts = shaped(scores, RewardConfig(combine="fallback"), shaping).parts

    assert parts["a"].tolist() == [0.5, 0.5, 0, 0]
    assert (np.array(scores) + parts["a"] + parts["fallback"]).tolist() == [0.5, 1, 1, 2]


def test_the_threshold_of_a_right_answer_can_be_set() -> None:
    config = RewardConfig(combine="fallback", right_from=0.5)

    parts = shaped([0.0, 0.5], config, [3.0, 3.0]).parts

    assert parts["a"].tolist() == [3, 0]
    assert parts["fallback"].tolist() == [-2.5, 0]


def test_the_clipped_amount_is_a_part_of_the_reward() -> None:
    parts = shaped([0.0, 5.0], RewardConfig(clip=(-1, 2)), [-3.0, 0.0]).parts

    assert parts["clip"].tolist() == [2, -3]


floats = st.floats(-100, 100, width=32)
bounds = st.tuples(floats, floats).filter(lambda pair: pair[0] < pair[1])
configs = st.builds(
    lambda combine, right_from, clip: RewardConfig(
        combine=combine, right_from=right_from if combine == "fallback" else None, clip=clip
    ),
    st.sampled_from(["add", "fallback"]),
    st.none() | floats,
    st.none() | bounds,
)


def reward(score: float, shaping: float, config: RewardConfig) -> float:
    parts = shaped([score], config, [shaping]).parts
    return score + sum(float(part[0]) for part in parts.values())


@fewer
@given(floats, floats, floats, configs)
def test_a_better_score_never_has_a_smaller_reward(
    low: float, high: float, shaping: float, config: RewardConfig
) -> None:
    low, high = min(low, high), max(low, high)

    assert reward(low, shaping, config) <= reward(high, shaping, config) + 1e-9


@fewer
@given(floats, floats, floats, floats, configs)
def test_a_fallback_never_ranks_a_failed_answer_above_a_right_one(
    one: float, other: float, shaping: float, more: float, config: RewardConfig
) -> None:
    right_from = 1.0 if config.right_from is None else config.right_from
    fails, right = min(one, other), max(one, other)
    if config.combine == "add" or not fails < right_from <= right:
        return

    assert reward(fails, shaping, config) <= reward(right, more, config) + 1e-9


@fewer
@given(floats, st.none() | bounds)
def test_without_components_only_the_clip_changes_anything(score: float, clip: tuple[float, float] | None) -> None:
    for config in (RewardConfig(clip=clip), RewardConfig(clip=clip, combine="fallback")):
        expected = score if clip is None else float(np.clip(score, *clip))
        parts = shaped([score], config).parts
        assert score + sum(float(part[0]) for part in parts.values()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format_markers": [{"marker": "a", "reward": 1}, {"marker": "b", "reward": "0.1"}]},
         r"Expected `float`, got `str` - at `\$.format_markers\[1\].reward`"),
        ({"format_markers": [{"marker": "", "reward": 1}]}, r">= 1, got '' - at `\$.format_markers\[0\].marker`"),
        ({"format_markers": [{"marker": "a", "reward": 1, "closing": ""}]}, r">= 1, got '' - at .*\[0\].closing`"),
        ({"format_markers": [{"marker": "a\0b", "reward": 1}]}, r"marker: expected text without .*markers\[0\]`"),
        ({"format_markers": [{"marker": "a", "reward": float("inf")}]}, r"reward: expected a finite .*markers\[0\]`"),
        ({"format_markers": [{"marker": "a", "reward": 1, "counted": "twice"}]}, r"'twice' - at .*\[0\].counted`"),
        ({"format_markers": [{"marker": "a", "reward": 1}], "ordered": True}, "ordered: expected two markers"),
        ({"length_bounty": {"reward": 0.1}}, r"missing required field `cap` - at `\$.length_bounty`"),
        ({"length_bounty": {"reward": 0.1, "cap": 0}}, r"cap: expected more than 0, got 0.* - at `\$.length_bounty`"),
        ({"length_bounty": {"reward": 0.1, "cap": 1, "unit": "word"}}, r"'word' - at `\$.length_bounty.unit`"),
        ({"overlong": {"length": 4, "cache": 5}}, r"cache: expected at most length, 4, got 5 - at `\$.overlong`"),
        ({"overlong": {"length": 4, "cache": 0}}, r">= 1, got 0 - at `\$.overlong.cache`"),
        ({"overlong": {"length": 4, "cache": 2, "penalty": -1}}, r"penalty: expected more than 0, got -1"),
        ({"combine": "multiply"}, r"'multiply' - at `\$.combine`"),
        ({"right_from": 0.5}, "right_from: expected only with combine: fallback, got 0.5"),
        ({"clip": [1, -1]}, r"clip: expected \[low, high\] with low < high"),
        ({"clip": [float("nan"), 1]}, "clip: expected a finite number, got nan"),
        ({"clips": [0, 1]}, "Object contains unknown field `clips`"),
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_sense_is_refused_with_its_path(values: Any, message: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^reward: .*{message}"):
        parse_config(RewardConfig, values, root="reward")
