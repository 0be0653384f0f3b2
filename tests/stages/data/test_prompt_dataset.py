from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from tests.fake_policy import FakePolicy, Letters

from penstock import AdvantageNormalizer, Batcher, SinkTrainer, SourceEnv, TrainBatch, TrajectoryGroup, Worker
from penstock import source as flow
from penstock.data import PromptDataset
from penstock.errors import InvalidConfig, InvalidData
from penstock.testing import Driven, drive_source

ROWS: list[dict[str, Any]] = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(10)]


def written(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def texts(dataset: PromptDataset, numbers: Sequence[int]) -> list[str]:
    prompts = dataset()
    return [str(prompts.prompt(number).content) for number in numbers]


class Marked:
    """A chat format of letters."""

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return Letters().encode("".join(f"{message['role'][0]}:{message['content']}|" for message in messages))


# -- order ---------------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    dataset = PromptDataset(ROWS)

    epochs = [texts(dataset, range(start, start + 10)) for start in (0, 10, 20)]

    assert all(sorted(epoch) == sorted(row["prompt"] for row in ROWS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_is_that_of_the_seed_wherever_it_is_begun() -> None:
    dataset = PromptDataset(ROWS, seed=3)

    assert texts(dataset, [17, 4]) == [texts(dataset, range(20))[17], texts(dataset, range(20))[4]]
    assert texts(dataset, range(10)) != texts(replace(dataset, seed=4), range(10))


def test_the_order_of_a_seed_stays_the_same_in_every_version() -> None:
    assert texts(PromptDataset(ROWS, seed=3), range(12)) == [f"{n}+1=" for n in (0, 4, 9, 7, 1, 5, 6, 3, 8, 2, 0, 6)]


def test_without_shuffling_rows_come_in_the_order_of_the_source() -> None:
    assert texts(PromptDataset(ROWS, shuffle=False), range(12)) == [f"{n % 10}+1=" for n in range(12)]


# -- split ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", [0.3, 4])
def test_the_splits_are_disjoint_and_have_every_row(evaluation: float) -> None:
    train = PromptDataset(ROWS, evaluation=evaluation, shuffle=False)
    held_out = replace(train, split="evaluation")

    both = texts(train, range(len(train()))) + texts(held_out, range(len(held_out())))

    assert sorted(both) == sorted(row["prompt"] for row in ROWS)
    assert 0 < len(held_out()) < 10


def test_a_number_of_rows_for_evaluation_is_exact() -> None:
    assert [len(PromptDataset(ROWS, split="evaluation", evaluation=number)()) for number in range(1, 10)] == [
        *range(1, 10)
    ]


@pytest.mark.parametrize("count", [20, 50, 100, 1000])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_a_share_for_evaluation_is_met_in_files_of_any_length(count: int, share: float) -> None:
    held_out = PromptDataset([{"prompt": "?"}] * count, split="evaluation", evaluation=share)

    assert len(held_out()) == pytest.approx(share * count, abs=1)


def test_the_rows_for_evaluation_have_every_kind_of_a_file_whose_kinds_alternate() -> None:
    rows = [{"prompt": "?", "kind": n % 10} for n in range(2000)]
    held_out = PromptDataset(rows, split="evaluation", evaluation=0.1)()

    counted = Counter(held_out.row(place)["kind"] for place in range(len(held_out)))

    assert set(counted) == set(range(10))
    assert all(count == pytest.approx(20, abs=10) for count in counted.values())


def test_the_split_is_the_same_for_every_seed() -> None:
    held_out = [PromptDataset(ROWS, split="evaluation", evaluation=4, seed=seed, shuffle=False) for seed in (0, 1)]

    assert texts(held_out[0], range(4)) == texts(held_out[1], range(4))


def test_rows_that_are_appended_move_no_row_into_or_out_of_a_share_for_evaluation() -> None:
    rows = [{"prompt": str(n)} for n in range(400)]
    before, after = (
        PromptDataset(some, split="evaluation", evaluation=0.2, shuffle=False) for some in (rows[:200], rows)
    )
    count = len(before())

    assert texts(before, range(count)) == texts(after, range(count))
    assert all(int(text) >= 200 for text in texts(after, range(count, len(after()))))


# -- columns -------------------------------------------------------------------------------------------------------


def test_every_column_is_in_the_meta_of_the_prompt() -> None:
    prompt = PromptDataset([{"question": "3+4=", "answer": 7, "level": None}], prompt="question", name="sums")().prompt(
        0
    )

    assert prompt.meta == {
        "data_source": "sums",
        "prompt": "3+4=",
        "row": {"question": "3+4=", "answer": 7, "level": None},
    }


def test_values_become_those_of_json() -> None:
    row = {
        "prompt": "?",
        "answer": np.int64(7),
        "weights": np.array([0.5, np.nan]),
        "day": date(2026, 11, 23),
        "label": np.str_("b"),
        "nested": {"pair": (1, np.bool_(True))},
    }

    assert PromptDataset([row])().row(0) == {
        "prompt": "?",
        "answer": 7,
        "weights": [0.5, None],
        "day": "2026-11-23",
        "label": "b",
        "nested": {"pair": [1, True]},
    }


@pytest.mark.parametrize("value", [b"png", {(1, 2): "x"}, object(), [{"deep": {2}}]])
def test_a_value_that_json_cannot_hold_is_refused_by_its_column(value: Any) -> None:
    with pytest.raises(InvalidData, match=r"column 'image': expected .*text, numbers"):
        PromptDataset([{"prompt": "?", "image": value}])()


def test_a_missing_column_is_refused_when_the_rows_are_opened_with_the_nearest_names() -> None:
    with pytest.raises(InvalidData, match="column 'questoin', which does not exist: set prompt to one of 'question'"):
        PromptDataset([{"question": "?", "answer": 1}], prompt="questoin")()


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidData, match="expected text in column 'prompt', got int"):
        PromptDataset([{"prompt": 3}])()


# -- chat ----------------------------------------------------------------------------------------------------------


def test_text_becomes_a_message_of_the_user_after_that_of_the_system() -> None:
    prompt = PromptDataset(ROWS[:1], chat=Marked(), system="Add.")().prompt(0)

    assert Letters().decode(list(map(int, prompt.content))) == "s:Add.|u:0+1=|"
    assert prompt.meta["prompt"] == "0+1="  # as in the row: reward functions get it in this form


def test_messages_are_used_as_they_are() -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "2+2="}]

    prompt = PromptDataset([{"prompt": messages}], chat=Marked(), system="Add.")().prompt(0)

    assert Letters().decode(list(map(int, prompt.content))) == "s:Short.|u:2+2=|"
    assert prompt.meta["messages"] == messages


def test_messages_without_a_chat_format_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        InvalidData, match=r"expected text in column 'prompt', got list: messages need PromptDataset\(chat="
    ):
        PromptDataset([{"prompt": [{"role": "user", "content": "2+2="}]}])()


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_file_of_json_lines_gives_its_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "sums.jsonl", [json.dumps(row) for row in ROWS])

    dataset = PromptDataset(path, shuffle=False)

    assert [dataset().row(n) for n in range(10)] == ROWS
    assert dataset().prompt(0).meta["data_source"] == "sums"


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "spaced.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n \t\n{"prompt": "a"}\r\n\n   \n {"prompt": "b"}\n\n{"prompt": "c"}')

    assert texts(PromptDataset(path, shuffle=False), range(len(PromptDataset(path)()))) == ["a", "b", "c"]


def test_rows_are_found_in_files_larger_than_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "rows.jsonl", [*(json.dumps({"prompt": "x" * n}) for n in range(1, 40)), " " * 50, ""])
    monkeypatch.setattr("penstock._stages.data.jsonl_rows.BLOCK_BYTES", 16)

    prompts = PromptDataset(path, shuffle=False)()

    assert [len(prompts.row(n)["prompt"]) for n in range(len(prompts))] == list(range(1, 40))


@pytest.mark.parametrize("line", ["{'prompt': 'x'}", '["x"]', '{"prompt": NaN}', '{"prompt": "x"} {}', "x", "[" * 9999])
def test_a_broken_line_is_an_error_with_its_number(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "broken.jsonl", ['{"prompt": "a"}', "", line])

    with pytest.raises(InvalidData, match=r"broken\.jsonl:3: expected one JSON object in a line, got "):
        PromptDataset(path)().row(1)


def test_a_file_that_was_changed_under_the_run_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ['{"prompt": "a"}'])
    prompts = PromptDataset(path)()

    written(path, ['{"prompt": "other"}'])

    with pytest.raises(InvalidData, match="got a changed one"):
        prompts.row(0)


def test_a_path_with_nothing_there_is_refused() -> None:
    with pytest.raises(InvalidData, match=r"expected a file or a folder at absent\.jsonl, got nothing there"):
        PromptDataset("absent.jsonl")()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (5, r"expected a path, or rows with len\(\) and \[number\], got int"),
        ({"train": ROWS, "test": ROWS}, "expected rows by number, got dict: take one of train, test"),
        (["3+4="], "row 0: expected a mapping from column to value, got str"),
    ],
)
def test_what_has_no_rows_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        PromptDataset(source)()


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="expected at least one row for train, got none of 0 rows"):
        PromptDataset(written(tmp_path / "empty.jsonl", ["", ""]))()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "split: expected one of train, evaluation, got 'test'"),
        ({"split": "evaluation"}, "evaluation: expected a share or a number"),
        ({"evaluation": 1.5}, "evaluation: expected a share below 1 or a whole number of rows, got 1.5"),
        ({"evaluation": -0.1}, "evaluation: expected a finite number of 0 or more"),
        ({"seed": -1}, "seed: expected a whole number of at least 0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens: expected a whole number"),
        ({"system": "Add."}, "system: expected none without chat"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"PromptDataset\.{message}"):
        PromptDataset(ROWS, **options)


def test_a_long_list_is_not_printed() -> None:
    assert repr(PromptDataset(ROWS, name="sums")) == "<PromptDataset 'sums': train, column 'prompt', seed 0>"


# -- in a source ---------------------------------------------------------------------------------------------------


async def sampled(source: SourceEnv, worker: Worker | None = None) -> Driven[TrajectoryGroup]:
    with structlog.testing.capture_logs():
        return await drive_source(source, worker=worker)


def source(dataset: Any, **options: Any) -> SourceEnv:
    chosen: dict[str, Any] = {"group_size": 2, "groups": 10} | options
    return SourceEnv(pickle.loads(pickle.dumps(dataset)), FakePolicy(), Letters(), **chosen)  # noqa: S301 (just made)


async def test_a_group_carries_the_row_of_its_prompt_and_a_score_of_zero() -> None:
    (group,) = await sampled(source(PromptDataset(ROWS, shuffle=False), groups=1, first_task=3))

    assert Letters().decode(group.tokens.tolist()) == "3+1=ok\0" * 2
    assert group.rewards.tolist() == [0, 0]
    assert group.meta["row"] == {"prompt": "3+1=", "answer": 4}
    assert group.meta["task"] == 3


async def test_the_score_of_zero_is_in_no_metric() -> None:
    groups = await sampled(source(PromptDataset(ROWS), groups=1))

    metrics = groups.metrics.emit(0)
    assert "rollout/reward" not in metrics
    assert metrics["rollout/trajectories"] == 2


async def test_workers_share_the_rows_of_an_epoch() -> None:
    stage = source(PromptDataset(ROWS), groups=20)

    groups = [group for index in range(3) for group in await sampled(stage, Worker(index=index, count=3))]

    assert Counter(group.meta["prompt"] for group in groups) == {row["prompt"]: 2 for row in ROWS}


async def test_prompts_of_messages_are_sampled_from_the_tokens_of_the_chat_format() -> None:
    (group,) = await sampled(source(PromptDataset(ROWS[:1], chat=Marked()), groups=1, group_size=1))

    assert Letters().decode(group.tokens.tolist()) == "u:0+1=|ok\0"


async def test_a_prompt_past_the_bound_ends_as_rejected() -> None:
    rows = [{"prompt": "short"}, {"prompt": "much longer"}]

    groups = await sampled(source(PromptDataset(rows, max_prompt_tokens=5, shuffle=False), groups=2))

    assert [group.meta["prompt"] for group in groups] == ["short"]
    assert groups.ledger.balance().reasons["rejected"] == {"prompt longer than 5 tokens": 2}


async def test_a_synchronous_schedule_goes_on_past_rejected_prompts() -> None:
    rows = [{"prompt": "much longer" if n % 3 else "short", "id": n} for n in range(12)]
    dataset = PromptDataset(rows, max_prompt_tokens=5, shuffle=False)
    batcher = Batcher(max_tokens=64, sequences=4)

    report = await (
        flow(source(dataset, groups=12), max_lag=0)
        .then(AdvantageNormalizer("none"))
        .then(batcher)
        .sink(SinkTrainer(Counting()))
        .run()
    )

    assert report.balance.ended["trained"] == 8
    assert report.balance.reasons["rejected"] == {"prompt longer than 5 tokens": 16}


class Counting:
    def step(self, batch: TrainBatch, /) -> dict[str, float]:
        return {"groups": len(batch.groups)}


async def test_a_broken_line_costs_only_its_own_prompt(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", ['{"prompt": "a"}', "{", '{"prompt": "b"}'])

    groups = await sampled(source(PromptDataset(path, shuffle=False), groups=3))

    assert sorted(group.meta["prompt"] for group in groups) == ["a", "b"]
    (reason,) = groups.ledger.balance().reasons["failed"]
    assert "rows.jsonl:2: expected one JSON object" in reason
