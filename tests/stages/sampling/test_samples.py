from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.pipeline.flow_stages import Groups, Pack
from tests.words import Words

from penstock import SinkTrainer, StopReason, TrainBatch, source
from penstock._pipeline.accounting.sample import best_and_worst
from penstock.testing import batch, drive_sink, group
from penstock.trackers import Sample, Samples


def packed(*rewards: Sequence[float]) -> TrainBatch:
    """Return a batch with a group for each list of rewards."""
    return TrainBatch.pack(
        group(instance_id=str(number), completion_lengths=[1] * len(each), rewards=each)
        for number, each in enumerate(rewards)
    )


def chosen(of: TrainBatch, count: int) -> list[tuple[str, int, str, int, float]]:
    samples = Samples(count=count).of(of, 1, Words())
    return [(each.kind, each.rank, each.instance_id, each.repetition, each.reward) for each in samples]


def test_the_best_and_the_worst_are_chosen_by_reward() -> None:
    assert chosen(packed([0.5, 3.0, 1.0], [2.0, -1.0, 0.0]), count=2) == [
        ("best", 1, "0", 1, 3.0),
        ("best", 2, "1", 0, 2.0),
        ("worst", 1, "1", 1, -1.0),
        ("worst", 2, "1", 2, 0.0),
    ]


def test_those_of_equal_reward_are_of_many_groups() -> None:
    found = chosen(packed([1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]), count=3)

    assert [instance for _, _, instance, _, _ in found] == ["0", "1", "2", "2", "0", "1"]


def test_no_trajectory_of_a_small_batch_is_shown_twice() -> None:
    assert chosen(packed([1.0, 1.0, 1.0]), count=5) == [
        ("best", 1, "0", 0, 1.0),
        ("best", 2, "0", 1, 1.0),
        ("worst", 1, "0", 2, 1.0),
    ]


def test_a_sample_has_the_text_and_the_numbers_of_its_trajectory() -> None:
    of = TrainBatch.pack(
        [
            group(
                env="sums",
                completion_lengths=[2, 1],
                prompt_length=2,
                rewards=[1.0, 0.0],
                tokens=np.arange(7),
                advantages=np.array([0, 0, 0.5, 1.5, 0, 0, -1]),
                reward_parts={"format": np.array([0.25, 0.0])},
                stop_reason=StopReason.LENGTH,
                policy_version=6,
            )
        ]
    )

    best, worst = Samples().of(of, 8, Words())

    assert (best.prompt, best.completion, best.completion_tokens) == ("0 1", "2 3", 2)
    assert (worst.prompt, worst.completion, worst.completion_tokens) == ("4 5", "6", 1)
    assert (best.advantage, worst.advantage, best.parts) == (1.0, -1.0, {"format": 0.25})
    assert (best.step, best.env, best.stop_reason, best.policy_version) == (8, "sums", "length", 6)


def test_answers_of_the_environment_belong_to_the_completion_and_trajectories_that_train_nothing_are_left_out() -> None:
    mask = np.array([False, True, False, True, False, False])
    of = TrainBatch.pack([group(completion_lengths=[3, 1], prompt_length=1, tokens=np.arange(6), loss_mask=mask)])

    (sample,) = Samples().of(of, 1, Words())

    assert (sample.prompt, sample.completion, sample.completion_tokens) == ("0", "1 2 3", 2)


def test_each_token_has_its_part_of_the_text_and_its_numbers() -> None:
    mask = np.array([False, True, False, True, True])
    logprobs = np.array([0, -0.5, 0, -1.0, -2.0])
    of = TrainBatch.pack(
        [
            group(
                completion_lengths=[4],
                prompt_length=1,
                tokens=np.arange(5),
                loss_mask=mask,
                advantages=np.array([0, 1, 0, 1, -3]),
                behavior_logprobs=logprobs,
                policy_versions=np.array([3, 3, 3, 3, 4]),
            )
        ]
    )

    (sample,) = Samples().of(of, 1, Words(), np.add(logprobs, [0, 0.25, 0, 0, -0.125]).astype(np.float32))

    assert sample.completion == "1 2 3 4"
    assert sample.tokens is not None
    assert sample.tokens.characters == [1, 2, 2, 2]
    assert sample.tokens.trains == [(1, True), (1, False), (2, True)]
    assert sample.tokens.advantages == [(2, 1.0), (1, -3.0)]
    assert sample.tokens.versions == [(2, 3), (1, 4)]
    assert sample.tokens.logprobs == [-0.5, -1.0, -2.0]
    assert sample.tokens.log_ratios == [0.25, 0.0, -0.125]


class Bytes(Words):
    """A tokenizer of bytes."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_counts_for_the_last_of_them() -> None:
    text = "aé€b".encode()
    of = TrainBatch.pack([group(completion_lengths=[7], prompt_length=1, tokens=np.array([65, *text]))])

    (sample,) = Samples().of(of, 1, Bytes())

    assert sample.completion == "aé€b"
    assert sample.tokens is not None
    assert sample.tokens.characters == [1, 0, 1, 0, 0, 1, 1]


class Counting(Words):
    """A tokenizer whose text has no part for each token."""

    def decode(self, ids: Sequence[int]) -> str:
        return f"{len(ids)} tokens: {sum(ids)}"


def test_without_a_part_of_the_text_for_each_token_there_are_no_tokens() -> None:
    of = TrainBatch.pack([group(completion_lengths=[4], prompt_length=1, tokens=np.arange(5))])

    (sample,) = Samples().of(of, 1, Counting())

    assert sample.tokens is None


def test_many_tokens_are_described_from_the_first_on() -> None:
    of = TrainBatch.pack([group(completion_lengths=[3000], prompt_length=1)])

    (sample,) = Samples().of(of, 1, Words())

    assert sample.tokens is not None
    assert len(sample.tokens.characters) == 2048
    assert sample.tokens.trains == [(2048, True)]


def test_the_other_sequences_of_a_rollout_are_its_branches() -> None:
    rollouts = np.array([0, 0, 0, 1])
    of = TrainBatch.pack([group(completion_lengths=[1, 2, 3, 1], prompt_length=1, rollout_ids=rollouts)])

    first, second = Samples().of(of, 1, Words())

    assert [first.completion_tokens, *(len(each.completion.split()) for each in first.branches)] == [3, 1, 2]
    assert second.branches == []


def test_the_first_step_and_every_k_th_have_samples() -> None:
    assert [step for step in range(1, 13) if Samples(every=4).due(step)] == [1, 4, 8, 12]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": "7"}, "7"),
        ({"answer": 7}, "7"),
        ({"ground_truth": ["7", "seven"]}, '["7","seven"]'),
        ({"reward_model": {"ground_truth": "7"}, "answer": "3 + 4 = 7"}, "7"),
        ({"answer": None}, None),
        ({"question": "3+4="}, None),
        (None, None),
    ],
)
def test_a_sample_has_the_right_answer_where_the_row_has_one(row: object, answer: str | None) -> None:
    of = TrainBatch.pack([group(completion_lengths=[1], meta={"row": row} if row is not None else {})])

    (sample,) = Samples().of(of, 1, Words())

    assert sample.answer == answer


def completed(instance_id: str, reward: float) -> Sample:
    (sample,) = Samples().of(
        TrainBatch.pack([group(instance_id=instance_id, completion_lengths=[1], rewards=[reward])]), 0, Words()
    )
    return msgspec.structs.replace(sample, evaluated=20, set="sums")


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_those_of_an_evaluation_are_the_same_for_any_number_of_workers_that_send_their_best_and_worst(
    workers: int,
) -> None:
    every = [completed(str(number), reward=float(number % 3)) for number in range(40)]
    shares = [every[index::workers] for index in range(workers)]
    sent = [sample for share in shares for _, _, sample in best_and_worst(share, 3, lambda each: (each.reward,))]

    chosen = Samples(count=3).of_evaluation(sent, step=21)

    assert chosen == Samples(count=3).of_evaluation(every, step=21)
    assert [(each.kind, each.rank, each.reward) for each in chosen] == [
        ("best", 1, 2.0), ("best", 2, 2.0), ("best", 3, 2.0), ("worst", 1, 0.0), ("worst", 2, 0.0), ("worst", 3, 0.0)
    ]  # fmt: skip
    assert {(each.step, each.evaluated) for each in chosen} == {(21, 20)}


class Trainer:
    def step(self, _: TrainBatch) -> dict[str, float]:
        return {}


class Broken(Words):
    def decode(self, ids: Sequence[int]) -> str:
        raise KeyError(ids[0])


async def test_a_tokenizer_that_cannot_decode_ends_no_run() -> None:
    sink = SinkTrainer(Trainer(), samples=Samples(), max_steps=2)
    pipeline = source(Groups(4, tokenizer=Broken())).then(Pack()).sink(sink)

    with capture_logs() as logs:
        await pipeline.run(view="lines")

    assert pipeline.report is not None
    assert pipeline.report.steps == 2
    assert [entry["step"] for entry in logs if entry["event"] == "samples_failed"] == [1]


async def test_samples_that_nothing_takes_are_not_made() -> None:
    driven = await drive_sink(SinkTrainer(Trainer(), samples=Samples()), [batch()])

    assert driven.ledger.balance().ended["trained"] == 4
