from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
from tests.fake_policy import FakePolicy, Letters
from tests.stages.answers import answering, drive_text

from penstock import RewardBridge, SourceEnv, TrajectoryGroup
from penstock.data import PromptDataset
from penstock.errors import MissingColumn
from penstock.rewards import RewardComponent, RewardFunction, RewardInput, trl_reward, verl_reward
from penstock.testing import drive, drive_source


def bridge(*functions: RewardComponent, **config: Any) -> RewardBridge:
    return RewardBridge.from_config(config, functions=functions)


def parts(shaped: TrajectoryGroup) -> dict[str, list[float]]:
    return {name: [round(x, 6) for x in part.tolist()] for name, part in shaped.reward_parts.items()}


ROW = {"prompt": "2+2?", "answer": "4"}


def question(*completions: str | Sequence[str], instance_id: str = "0", **meta: Any) -> TrajectoryGroup:
    """Return completions of a prompt that is a row of a data set."""
    return answering(*completions, instance_id=instance_id, meta={"prompt": "2+2?", "row": ROW} | meta)


# -- weights and values ------------------------------------------------------------------------------------------------


def length(completion: RewardInput) -> float:
    return float(len(completion.text))


def is_right(completion: RewardInput) -> bool:
    return bool(completion.text == completion.row["answer"])


async def test_a_weight_scales_the_part_and_not_the_metric() -> None:
    out = await drive_text(
        bridge(RewardFunction(length, weight=0.5), RewardFunction(is_right, weight=2)), [question("4", "five")]
    )

    assert parts(out[0]) == {"score": [0, 0], "length": [0.5, 2], "is_right": [2, 0]}
    metrics = out.metrics.emit(0)
    assert metrics["rewards/length/mean"] == 2.5
    assert metrics["rewards/is_right/mean"] == 0.5


async def test_none_adds_nothing_and_is_not_in_the_metric() -> None:
    def sometimes(completion: RewardInput) -> float | None:
        return None if completion.text == "?" else 3.0

    out = await drive_text(bridge(RewardFunction(sometimes), RewardFunction(length)), [question("4", "?")])

    assert out[0].rewards.tolist() == [4, 1]
    assert out.metrics.emit(0)["rewards/sometimes/mean"] == 3


async def test_a_completion_to_which_no_function_applies_ends_as_filtered_if_its_prompt_has_no_score() -> None:
    def sometimes(completion: RewardInput) -> float | None:
        return None if completion.text == "?" else 3.0

    scored = answering("?", rewards=[1], instance_id="1")
    out = await drive_text(bridge(RewardFunction(sometimes, weight=2)), [question("4", "?"), scored])

    assert [group.rewards.tolist() for group in out] == [[6], [1]]
    assert out.ledger.balance().reasons["filtered"] == {"no reward function applies": 1}


async def test_of_a_mapping_the_score_trains_and_other_numbers_are_metrics() -> None:
    def judge(completion: RewardInput) -> dict[str, Any]:
        return {"score": 1.0, "acc": completion.text == "4", "words": np.int64(2), "why": "it is right"}

    out = await drive_text(bridge(RewardFunction(judge)), [question("4", "5")])

    assert out[0].rewards.tolist() == [1, 1]
    assert list(out[0].reward_parts) == ["judge", "score"]
    metrics = out.metrics.emit(0)
    assert (metrics["rewards/judge/acc"], metrics["rewards/judge/words"]) == (0.5, 2)
    assert "rewards/judge/why" not in metrics


async def test_a_batched_function_judges_a_group_in_one_call() -> None:
    calls: list[list[str]] = []

    def rank(completions: Sequence[RewardInput]) -> Sequence[float]:
        calls.append([each.text for each in completions])
        return np.arange(len(completions), dtype=np.float32)  # type: ignore[return-value]  # as users do

    out = await drive_text(
        bridge(RewardFunction(rank, batched=True, concurrency=1)), [question("a", "b"), question("c", instance_id="1")]
    )

    assert calls == [["a", "b"], ["c"]]
    assert [group.rewards.tolist() for group in out] == [[0, 1], [0]]


async def test_of_a_batched_call_one_bad_value_costs_one_completion_and_an_error_all() -> None:
    def judge(completions: Sequence[RewardInput]) -> Sequence[float]:
        if len(completions) == 3:
            return [0.0]
        return [math.nan, 1.0]

    out = await drive_text(
        bridge(RewardFunction(judge, batched=True)), [question("a", "b"), question(*"abc", instance_id="1")]
    )

    assert [group.rewards.tolist() for group in out] == [[1]]
    assert out.ledger.balance().reasons["failed"] == {
        "judge: ValueError: expected a finite number, got nan": 1,
        "judge: ValueError: expected 3 values, one for each completion, got 1": 3,
    }


async def test_a_weight_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="length: weight: expected a finite number, got nan"):
        RewardFunction(length, weight=math.nan)


# -- TRL ---------------------------------------------------------------------------------------------------------------


async def test_a_function_of_trl_is_called_with_the_arguments_that_trl_passes() -> None:
    seen: dict[str, Any] = {}

    def accuracy(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, thread=threading.current_thread())
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    out = await drive_text(bridge(trl_reward(accuracy, weight=0.5)), [question("4", "5", row=ROW | {"level": 3})])

    assert parts(out[0]) == {"score": [0, 0], "accuracy": [0.5, 0]}
    assert seen["prompts"] == ["2+2?", "2+2?"]
    assert seen["level"] == [3, 3]
    assert seen["completion_ids"] == [[ord("4")], [ord("5")]]
    assert seen["trainer_state"].global_step == 0
    assert seen["thread"] is not threading.main_thread()
    assert "prompt" not in seen


async def test_where_the_prompt_is_a_conversation_trls_completions_are_messages() -> None:
    seen: list[Any] = []

    def look(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.extend([*prompts, *completions])
        return [0.0] * len(completions)

    messages = [{"role": "user", "content": "2+2?"}]
    await drive_text(bridge(trl_reward(look)), [question("4", ["let me see", "go on", "4"], "", messages=messages)])

    assert seen[:3] == [messages] * 3
    assert [[message["content"] for message in completion] for completion in seen[3:]] == [
        ["4"],
        ["let me see", "4"],
        [""],
    ]
    assert seen[3] == [{"role": "assistant", "content": "4"}]


async def test_trls_none_and_nan_add_nothing() -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        return [None, math.nan, 1.0][: len(completions)]

    out = await drive_text(bridge(trl_reward(some, 0.5), RewardFunction(length)), [question("a", "b", "c")])

    assert out[0].rewards.tolist() == [1, 1, 1.5]


async def test_an_async_function_of_trl_runs_on_the_event_loop() -> None:
    async def judge(completions: list[str], **_: Any) -> list[float]:
        await anyio.lowlevel.checkpoint()
        return [2.0] * len(completions)

    (out,) = await drive_text(bridge(trl_reward(judge)), [question("a", "b")])

    assert out.rewards.tolist() == [2, 2]


async def test_an_empty_completion_is_judged_like_others() -> None:
    def length_of(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(text) + len(ids)) for text, ids in zip(completions, completion_ids, strict=True)]

    empty = TrajectoryGroup.build(
        env="e", instance_id="0", sequences=[[]], loss_mask=[[]], rewards=[0.0], policy_versions=np.zeros(0, np.int64)
    )
    (out,) = await drive_text(bridge(trl_reward(length_of)), [empty])

    assert out.rewards.tolist() == [0]


async def test_what_a_function_of_trl_logs_becomes_metrics() -> None:
    def logging(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("share", 0.25)
        log_metric("share", 0.75)
        log_extra("solution", ["x"])
        return [0.0] * len(completions)

    out = await drive_text(bridge(trl_reward(logging)), [question("a", "b")])

    assert out.metrics.emit(0)["rewards/logging/share"] == 0.5


async def test_a_function_without_kwargs_is_given_what_it_names() -> None:
    def exact(completions: list[str], answer: list[str]) -> list[float]:
        return [float(one == other) for one, other in zip(completions, answer, strict=True)]

    (out,) = await drive_text(bridge(trl_reward(exact)), [question("4", "5")])

    assert out.rewards.tolist() == [1, 0]


async def test_a_column_that_the_data_lacks_ends_the_run_at_once() -> None:
    def accuracy(completions: list[str], answers: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in zip(completions, answers, strict=True)]

    message = (
        r"accuracy: expected the data to have a column 'answers', .* \['answer', 'prompt'\]; did you mean 'answer'"
    )
    with pytest.raises(MissingColumn, match=message):
        await drive_text(bridge(trl_reward(accuracy)), [question("4")])


# -- verl --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"data_source": "maths", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}},
        {"data_source": "maths", "ground_truth": "4", "extra_info": {"index": 7}},
        {"data_source": "maths", "answer": "4", "extra_info": {"index": 7}},
    ],
    ids=["as in verl's files", "a column ground_truth", "a column answer"],
)
async def test_a_function_of_verl_is_called_with_the_arguments_that_verl_passes(row: dict[str, Any]) -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
    ) -> float:
        assert data_source == "maths"
        assert extra_info == {"index": 7, "num_turns": 1, "rollout_reward_scores": {}}
        return float(solution_str == ground_truth)

    (out,) = await drive_text(bridge(verl_reward(compute_score, weight=2)), [question("4", "5", row=row)])

    assert parts(out) == {"score": [0, 0], "compute_score": [2, 0]}


async def test_of_verls_dict_the_score_trains() -> None:
    async def compute_score(solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"score": -1.0 if solution_str != ground_truth else 1.0, "acc": solution_str == ground_truth}

    out = await drive_text(bridge(verl_reward(compute_score)), [question("4", "5")])

    assert out[0].rewards.tolist() == [1, -1]
    assert out.metrics.emit(0)["rewards/compute_score/acc"] == 0.5


async def test_verls_function_needs_a_ground_truth() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    with pytest.raises(MissingColumn, match="compute_score: expected the data to have a column 'ground_truth'"):
        await drive_text(bridge(verl_reward(compute_score)), [question("4", row={"question": "2+2?"})])


# -- from a data set ---------------------------------------------------------------------------------------------------


async def test_every_column_of_a_data_set_reaches_functions_of_trl_and_verl() -> None:
    def exact(completions: list[str], answer: list[str], level: list[int], **_: Any) -> list[float]:
        return [hard * float(a == b) for a, b, hard in zip(completions, answer, level, strict=True)]

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return float((data_source, solution_str, extra_info["index"]) == ("sums", ground_truth, 7))

    rows = [{"question": "2+2=", "answer": "4", "level": 3, "extra_info": {"index": 7}}]
    policy = FakePolicy(answer=lambda _: "4")
    dataset = PromptDataset(rows, prompt="question", name="sums")
    groups = await drive_source(SourceEnv(dataset, policy, Letters(), group_size=2, groups=1))

    bridge = RewardBridge(functions=[trl_reward(exact), verl_reward(compute_score)])
    (out,) = await drive(bridge, groups, tokenizer=Letters())

    assert parts(out) == {"score": [0, 0], "exact": [3, 3], "compute_score": [1, 1]}


# -- names -------------------------------------------------------------------------------------------------------------


class Style:
    """A reward as an object."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)


def test_a_component_is_named_after_its_function() -> None:
    assert trl_reward(Style()).name == "Style"
    assert trl_reward(partial(Style(), scale=2)).name == "Style"
    assert verl_reward(length, name="long").name == "long"
    with pytest.raises(ValueError, match="name: expected one"):
        trl_reward(lambda completions: [0.0] * len(completions))


def test_functions_of_trl_and_verl_can_be_sent_to_a_process() -> None:
    stage = bridge(trl_reward(Style()), verl_reward(length))

    assert [each.name for each in pickle.loads(pickle.dumps(stage)).components] == ["Style", "length"]  # noqa: S301 (ours)
