from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import AdvantageNormalizer, Batcher, Context, Schedule, TrainBatch, TrajectoryGroup
from penstock.channels import memory_channel
from penstock.errors import InvalidRecord, RecordTooLarge
from penstock.testing import drive, entered, group


def of_tokens(*counts: int, first: int = 0, **more: Any) -> list[TrajectoryGroup]:
    """Return a group of two equally long sequences for each of `counts`, its number of tokens."""
    return [
        group(instance_id=str(first + i), completion_lengths=[count // 2 - 2] * 2, rewards=[0, 1], **more)
        for i, count in enumerate(counts)
    ]


def names(batches: Sequence[TrainBatch]) -> list[list[str]]:
    return [[packed.instance_id for packed in batch.groups] for batch in batches]


class Training:
    """A batcher between a source and a trainer that are driven by hand."""

    def __init__(self, batcher: Batcher, max_lag: int | None = None) -> None:
        self.context = Context(schedule=Schedule(max_lag))
        self._batcher = batcher
        self._feed, self._inbox = memory_channel[TrajectoryGroup](100)
        self._outbox, self._batches = memory_channel[TrainBatch](100)

    async def run(self, play: Callable[[], Any]) -> None:
        async with self._feed, self._inbox, self._outbox, self._batches, anyio.create_task_group() as tasks:
            with entered(self.context):
                tasks.start_soon(self._batcher.run, self._inbox, self._outbox)
                await play()
            tasks.cancel_scope.cancel()

    async def feed(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Send groups, and run the batcher until it waits."""
        for fed in groups:
            self.context.ledger.admit(fed.id, fed.rollout_ids.tolist())
            await self._feed.send(fed)
        await anyio.wait_all_tasks_blocked()

    def train(self) -> list[str]:
        """Take one batch and train it: one optimizer step."""
        batch = self._batches.receive_nowait()
        ledger = self.context.ledger
        assert batch.lags(ledger.step).max() <= (self.context.schedule.max_lag or 1_000_000)
        ledger.commit(batch, ledger.step + 1)
        return names([batch])[0]

    def waiting(self) -> int:
        return self._batches.statistics().items

    def dropped(self, state: str) -> dict[str, int]:
        return self.context.ledger.balance().reasons[state]


# -- when a batch ships ----------------------------------------------------------------------------------------------


async def test_a_batch_ships_when_another_group_of_its_kind_would_not_fit() -> None:
    training = Training(Batcher(max_tokens=30))

    async def play() -> None:
        await training.feed(of_tokens(10, 10))
        assert training.waiting() == 0
        await training.feed(of_tokens(10, first=2))
        assert training.waiting() == 1

    await training.run(play)


async def test_a_group_that_does_not_fit_begins_the_next_batch() -> None:
    out = await drive(Batcher(max_tokens=30), of_tokens(10, 10, 14, 10))

    assert names(out) == [["0", "1"], ["2", "3"]]


async def test_a_batch_ships_when_it_holds_the_number_of_trajectories_that_is_wanted() -> None:
    training = Training(Batcher(max_tokens=1000, sequences=6))

    async def play() -> None:
        await training.feed(of_tokens(10, 10))
        assert training.waiting() == 0
        await training.feed(of_tokens(10, 10, first=2))
        assert training.train() == ["0", "1", "2"]
        assert training.waiting() == 0

    await training.run(play)


async def test_groups_stay_whole_even_beyond_the_number_that_is_wanted() -> None:
    out = await drive(Batcher(max_tokens=1000, sequences=3), of_tokens(10, 10, 10))

    assert [len(batch) for batch in out] == [4, 2]


async def test_a_number_of_groups_that_exceeds_the_tokens_is_cut() -> None:
    out = await drive(Batcher(max_tokens=25, sequences=100), of_tokens(10, 10, 10))

    assert names(out) == [["0", "1"], ["2"]]


async def test_the_rest_is_sent_at_the_end_of_the_stream() -> None:
    out = await drive(Batcher(max_tokens=1000), of_tokens(10))

    assert names(out) == [["0"]]


async def test_no_groups_make_no_batch() -> None:
    assert await drive(Batcher(max_tokens=1000), []) == []


sizes = st.lists(st.integers(3, 25).map(lambda n: 2 * n), max_size=25)
fewer = settings(max_examples=40)


@fewer
@given(sizes, st.none() | st.integers(1, 20))
def test_every_group_ships_once_in_order_within_the_budget(sizes: list[int], sequences: int | None) -> None:
    groups = of_tokens(*sizes)

    out = anyio.run(drive, Batcher(max_tokens=50, sequences=sequences), groups)

    assert [name for batch in names(out) for name in batch] == [g.instance_id for g in groups]
    assert all(len(batch.tokens) <= 50 for batch in out)
    assert [x for batch in out for x in batch.tokens.tolist()] == [x for g in groups for x in g.tokens.tolist()]


@fewer
@given(sizes)
def test_no_two_neighbouring_batches_would_have_fitted_into_half_the_budget(sizes: list[int]) -> None:
    out = anyio.run(drive, Batcher(max_tokens=100), of_tokens(*sizes))

    assert all(len(a.tokens) + len(b.tokens) > 50 for a, b in itertools.pairwise(out))


# -- slots -----------------------------------------------------------------------------------------------------------


async def test_a_group_is_copied_as_it_arrives_so_that_its_slot_is_free_at_once() -> None:
    training = Training(Batcher(max_tokens=1000, sequences=4))
    first, second = of_tokens(10, 10)
    expected = [*first.tokens.tolist(), *second.tokens.tolist()]

    async def play() -> None:
        await training.feed([first])
        first.tokens.flags.writeable = True
        first.tokens[:] = 0  # the producer reuses the slot
        await training.feed([second])
        assert training._batches.receive_nowait().tokens.tolist() == expected

    await training.run(play)


async def test_a_group_that_makes_a_batch_ship_is_copied_before_the_wait_for_credit() -> None:
    feed, inbox = memory_channel[TrajectoryGroup](10)
    outbox, batches = memory_channel[TrainBatch](1)
    groups = of_tokens(30, 14, 30)
    expected = [g.tokens.tolist() for g in groups]

    async with feed, inbox, outbox, batches, anyio.create_task_group() as tasks:
        with entered(Context()):
            tasks.start_soon(Batcher(max_tokens=40).run, inbox, outbox)
            for fed in groups:
                await feed.send(fed)
            await anyio.wait_all_tasks_blocked()  # the second batch, which the third group displaced, waits for credit
            groups[2].tokens.flags.writeable = True
            groups[2].tokens[:] = 0
            assert [(await batches.receive()).tokens.tolist() for _ in groups] == expected
            tasks.cancel_scope.cancel()


# -- refused and dropped groups --------------------------------------------------------------------------------------


async def test_a_group_that_can_never_fit_is_an_error_with_the_sizes() -> None:
    with pytest.raises(RecordTooLarge, match=r"test/1: expected a group of at most 20 tokens .* got 2 .* of 22 tokens"):
        await drive(Batcher(max_tokens=20), of_tokens(20, 22))


async def test_groups_with_different_columns_are_an_error() -> None:
    plain, other = of_tokens(10, 10)

    with pytest.raises(InvalidRecord, match=r"extra \['advantages'\]"):
        await drive(Batcher(max_tokens=100), [plain, other.with_advantages([1.0, 2.0])])


async def test_groups_without_variance_are_dropped_on_request() -> None:
    given = [
        group(instance_id="flat", rewards=[1, 1]),
        group(instance_id="steep", rewards=[0, 1]),
        group(instance_id="noise", rewards=[1 / 3, float(np.nextafter(np.float32(1 / 3), np.float32(1)))]),
        group(instance_id="alone", rewards=[1], completion_lengths=[3]),
    ]

    out = await drive(Batcher(max_tokens=100, drop_zero_variance=True), given)
    everything = await drive(Batcher(max_tokens=100), given)

    assert names(out) == [["steep", "alone"]]
    assert out.ledger.balance().reasons["filtered"] == {"zero variance": 4}
    assert names(everything) == [["flat", "steep", "noise", "alone"]]


async def test_variance_is_that_of_the_sequences_that_train() -> None:
    mask = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    masked = group(rewards=[1, 1, 0], completion_lengths=[2, 2, 2], loss_mask=mask)

    out = await drive(Batcher(max_tokens=100, drop_zero_variance=True), [masked])

    assert out == []


async def test_rewards_that_differ_by_what_rounding_left_of_their_parts_have_no_variance() -> None:
    rounded = group(rewards=[1e-8, 0]).with_rewards([1e-8, 0], parts={"score": [0.3, 0], "bounty": [-0.3, 0]})

    out = await drive(Batcher(max_tokens=100, drop_zero_variance=True), [rounded])

    assert out.ledger.balance().reasons["filtered"] == {"zero variance": 2}


async def test_where_there_are_advantages_they_decide_and_not_the_rewards() -> None:
    equal, different = group(instance_id="equal", rewards=[1, 1]), group(instance_id="different", rewards=[0, 1])
    alone = group(instance_id="alone", rewards=[1], completion_lengths=[3])
    given = [
        equal.with_advantages([0.5, -0.5]),
        different.with_advantages([0, 0]),
        alone.with_advantages([0]),
    ]

    out = await drive(Batcher(max_tokens=100, drop_zero_variance=True), given)

    assert names(out) == [["equal"]]
    assert out.ledger.balance().reasons["filtered"] == {"zero advantages": 3}


async def test_a_group_with_candidates_is_kept_with_any_rewards() -> None:
    flat = group(rewards=[1, 1], completion_lengths=[1, 1], prompt_length=1).with_advantages([0, 0])

    def with_teacher(ids: list[int]) -> TrajectoryGroup:
        column = np.array(ids, np.int32)[:, None]
        return msgspec.structs.replace(flat, teacher_ids=column, teacher_logprobs=np.zeros(column.shape, np.float32))

    taught = await drive(Batcher(max_tokens=9, drop_zero_variance=True), [with_teacher([-1, 3] * 2)])
    untaught = await drive(Batcher(max_tokens=9, drop_zero_variance=True), [with_teacher([-1] * 4)])

    assert len(taught[0]) == 2
    assert untaught == []


async def test_a_group_without_a_token_that_trains_is_dropped() -> None:
    given = [group(instance_id="masked", loss_mask=[0] * 14), group(instance_id="live")]

    out = await drive(Batcher(max_tokens=100), given)

    assert names(out) == [["live"]]
    assert out.ledger.balance().reasons["filtered"] == {"nothing to train": 2}
    assert out.metrics.emit(0)["dropped/filtered"] == 2


# -- what a sender silenced -------------------------------------------------------------------------------------------

SILENCED = {"overrides": [{}, {"set_advantage_to_zero": True}]}
"""Of the second sequence."""


@pytest.mark.parametrize("advantages", [None, [1.0] * 4 + [2.0] * 4])
@pytest.mark.parametrize("normalizer", [None, AdvantageNormalizer("grpo")])
async def test_a_sequence_that_its_sender_silenced_trains_nothing_whether_or_not_anybody_compared_it(
    normalizer: AdvantageNormalizer | None, advantages: list[float] | None
) -> None:
    """Without a normalizer, Distillation would train it, and any loss if the data contains its advantages."""
    groups = [group(completion_lengths=[2, 2], rewards=[0, 1], advantages=advantages, meta=SILENCED)]
    if normalizer is not None:
        groups = await drive(normalizer, groups)

    (batch,) = await drive(Batcher(max_tokens=8), groups)

    assert batch.loss_mask.tolist() == [False, False, True, True, *[False] * 4]
    assert (batch.loss_tokens, batch.loss_rollouts) == (2, 1)
    if batch.advantages is not None:
        assert not batch.advantages[4:].any()
        assert batch.advantages[2:4].all()


async def test_a_group_of_which_all_was_silenced_is_dropped() -> None:
    driven = await drive(Batcher(max_tokens=8), [group(meta=SILENCED).select(np.array([False, True]))])

    assert driven == []
    assert driven.ledger.balance().reasons["filtered"] == {"nothing to train": 1}


# -- staleness -------------------------------------------------------------------------------------------------------


async def test_a_group_older_than_the_bound_is_dropped_as_stale() -> None:
    training = Training(Batcher(max_tokens=100, sequences=4), max_lag=2)

    async def play() -> None:
        training.context.ledger.step = 10
        await training.feed(of_tokens(10, policy_version=7))
        await training.feed(of_tokens(10, 10, first=1, policy_version=8))
        assert training.train() == ["1", "2"]
        assert training.dropped("stale") == {"lag over 2": 2}

    await training.run(play)


async def test_one_old_trajectory_makes_its_whole_group_stale() -> None:
    training = Training(Batcher(max_tokens=100, sequences=2), max_lag=0)

    async def play() -> None:
        training.context.ledger.step = 1
        await training.feed([group(rewards=[0, 1], policy_versions=[1, 0], instance_id="mixed")])
        await training.feed([group(instance_id="fresh", policy_version=1)])
        assert training.train() == ["fresh"]

    await training.run(play)


async def test_the_oldest_token_decides_where_weights_changed_within_a_rollout() -> None:
    training = Training(Batcher(max_tokens=100, sequences=1), max_lag=1)
    versions = np.array([3, 3, 3, 3, 4, 4], np.int64)

    async def play() -> None:
        training.context.ledger.step = 4
        await training.feed([group(completion_lengths=[4], policy_versions=versions, instance_id="fresh")])
        assert training.train() == ["fresh"]
        await training.feed([group(completion_lengths=[4], policy_versions=versions, instance_id="old")])
        assert training.waiting() == 0
        assert training.dropped("stale") == {"lag over 1": 1}

    await training.run(play)


async def test_batches_that_wait_to_be_trained_count_as_steps_to_come() -> None:
    training = Training(Batcher(max_tokens=100, sequences=2), max_lag=1)

    async def play() -> None:
        await training.feed(of_tokens(*[10] * 4))  # all of version 0: the first two batches will be trained in time
        assert training.waiting() == 2
        assert training.dropped("stale") == {"lag over 1": 4}
        training.train()  # here `lags` is held to the bound, at the step that trains it
        training.train()

    await training.run(play)


async def test_a_batch_of_groups_of_different_sizes_counts_as_a_step_to_come_too() -> None:
    training = Training(Batcher(max_tokens=100, sequences=5), max_lag=0)
    pair, triple = (group(completion_lengths=[1] * size, instance_id=str(size)) for size in (2, 3))

    async def play() -> None:
        await training.feed([pair, triple])
        await training.feed(of_tokens(10))
        assert training.dropped("stale") == {"lag over 0": 2}
        assert training.train() == ["2", "3"]

    await training.run(play)


async def test_a_batch_that_was_lost_on_the_way_is_no_step_to_come() -> None:
    training = Training(Batcher(max_tokens=100, sequences=2), max_lag=0)

    async def play() -> None:
        await training.feed(of_tokens(10))
        lost = training._batches.receive_nowait()
        training.context.ledger.end(lost.ids, "failed", "the trainer would not have it")
        await training.feed(of_tokens(10, first=1))
        assert training.train() == ["1"]

    await training.run(play)


async def test_a_group_that_became_stale_while_the_batch_was_filled_does_not_ship() -> None:
    training = Training(Batcher(max_tokens=100, sequences=6), max_lag=1)

    async def play() -> None:
        await training.feed(of_tokens(10, policy_version=0))
        await training.feed(of_tokens(10, first=1, policy_version=1))  # just within the bound, as it turns out
        training.context.ledger.step = 2  # steps that another batcher's batches took
        await training.feed(of_tokens(10, first=2, policy_version=2))
        assert training.train() == ["1", "2"]
        assert training.dropped("stale") == {"lag over 1": 2}

    await training.run(play)


async def test_a_batch_of_which_nothing_is_fresh_does_not_ship_at_all() -> None:
    training = Training(Batcher(max_tokens=25, sequences=8), max_lag=1)

    async def play() -> None:
        await training.feed(of_tokens(10, 10, policy_version=0))
        training.context.ledger.step = 2
        await training.feed(of_tokens(10, first=2, policy_version=2))
        assert training.waiting() == 0
        assert training.dropped("stale") == {"lag over 1": 4}

    await training.run(play)


async def test_without_a_bound_nothing_is_stale() -> None:
    training = Training(Batcher(max_tokens=100, sequences=2))

    async def play() -> None:
        training.context.ledger.step = 1_000
        await training.feed(of_tokens(10))
        assert training.train() == ["0"]

    await training.run(play)


@fewer
@given(st.integers(0, 3), st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_no_batch_ever_trains_a_trajectory_older_than_the_bound(max_lag: int, turns: list[tuple[bool, int]]) -> None:
    training = Training(Batcher(max_tokens=40), max_lag=max_lag)

    async def play() -> None:
        for number, (feeds, behind) in enumerate(turns):
            if feeds:
                version = max(0, training.context.ledger.step - behind)
                await training.feed(of_tokens(10 + number % 3 * 2, first=number, policy_version=version))
            elif training.waiting():
                training.train()  # asserts the bound
        assert training.context.ledger.balance().balanced

    anyio.run(training.run, play)


# -- telling ---------------------------------------------------------------------------------------------------------


async def test_metrics_describe_the_fill_of_batches_and_the_cost_of_padding() -> None:
    given = [group(completion_lengths=[2, 6], prompt_length=2, rewards=[0, 1])]

    out = await drive(Batcher(max_tokens=24), given)

    metrics = out.metrics.emit(0)
    assert metrics["batch/packing_efficiency"] == 12 / 24
    assert metrics["batch/padding_efficiency"] == 12 / 16


def test_a_pipeline_can_ask_how_large_a_group_may_be() -> None:
    assert Batcher(max_tokens=100).stage_info().takes_at_most_tokens == 100


@pytest.mark.parametrize("arguments", [{"max_tokens": 0}, {"sequences": 0}])
def test_numbers_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}: expected a whole number of at least"):
        Batcher(**{"max_tokens": 10, **arguments})


async def test_in_a_synchronous_schedule_a_batch_does_not_depend_on_the_order_of_arrival() -> None:
    received = [group(instance_id=name, policy_versions=[0, 0], rewards=[0, 1]) for name in "bca"]

    (batch,) = await drive(Batcher(max_tokens=999), received, schedule=Schedule(0))

    assert [packed.instance_id for packed in batch.groups] == ["a", "b", "c"]


async def test_sequences_of_groups_in_which_nothing_trains_are_counted_with_the_batch_that_was_filled() -> None:
    masked = [group(instance_id=f"masked-{n}", loss_mask=np.zeros(14, np.bool_)) for n in range(2)]
    first, second, third = (group(instance_id=str(n), rewards=[0, 1]) for n in range(3))
    equal = group(instance_id="3", rewards=[1, 1])
    given = [first, masked[0], second, third, masked[1], equal]

    out = await drive(Batcher(max_tokens=100, sequences=4, drop_zero_variance=True), given)

    assert [(len(batch), batch.loss_rollouts, batch.total_rollouts) for batch in out] == [(4, 4, 6), (2, 2, 4)]
    assert out.ledger.balance().reasons["filtered"] == {"nothing to train": 4, "zero variance": 2}
