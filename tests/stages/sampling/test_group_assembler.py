"""GroupAssembler: the pieces of a group leave together, received in any order and any number of times."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
import structlog

from penstock import (
    Batcher,
    Context,
    GroupAssembler,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    Source,
    TrainBatch,
    TrajectoryGroup,
    processes,
    source,
)
from penstock.accounting import Ledger
from penstock.channels import memory_channel
from penstock.errors import InvalidPipeline
from penstock.testing import VirtualClock, drive, entered, group

SIZE = 3


def whole(name: str, **columns: Any) -> TrajectoryGroup:
    return group(instance_id=name, completion_lengths=[4, 6, 2], rewards=[0, 1, 2], seed=ord(name), **columns)


def piece(name: str, *repetitions: int, **columns: Any) -> TrajectoryGroup:
    """Return some repetitions of `whole(name)`."""
    return whole(name, **columns).select(np.isin(np.arange(SIZE), repetitions))


def pieces(name: str) -> list[TrajectoryGroup]:
    return [piece(name, repetition) for repetition in range(SIZE)]


def names(groups: Iterable[TrajectoryGroup]) -> list[tuple[str, list[int]]]:
    return [(each.instance_id, each.rollout_ids.tolist()) for each in groups]


def contents(record: TrajectoryGroup) -> tuple[bytes, dict[str, tuple[str, bytes]]]:
    return record.header(), {name: (column.dtype.str, column.tobytes()) for name, column in record.columns().items()}


class Assembling:
    """A GroupAssembler in virtual time; `feed` admits records to the ledger without copies, as an edge does."""

    def __init__(self, stage: GroupAssembler, *, room: int = 100) -> None:
        self.clock = VirtualClock()
        self.ledger = Ledger()
        self.context = Context(ledger=self.ledger)
        self.stage = stage
        self.inlet, self._inbox = memory_channel[TrajectoryGroup](100)
        self._outbox, self.out = memory_channel[TrajectoryGroup](room)

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        """Run `play` while the stage runs."""

        async def played() -> None:
            async with self.inlet, self._inbox, self.out, anyio.create_task_group() as tasks:
                with entered(self.context):
                    tasks.start_soon(self._run)
                await play()
                tasks.cancel_scope.cancel()

        self.clock.run(played)

    async def _run(self) -> None:
        async with self._outbox:
            await self.stage.run(self._inbox, self._outbox)

    async def feed(self, *given: TrajectoryGroup) -> None:
        for record in given:
            copies = self.ledger.hand_over(record)
            if new := [each for each in record.rollout_ids.tolist() if not copies >> each & 1]:
                await self.inlet.send(record.select(np.isin(record.rollout_ids, new)))
        await anyio.wait_all_tasks_blocked()

    def sent(self) -> list[TrajectoryGroup]:
        """Return the groups that the stage has sent."""
        return [self.out.receive_nowait() for _ in range(self.out.statistics().items)]

    async def rest(self) -> list[TrajectoryGroup]:
        """End the stream, and return the groups that the stage sends then."""
        await self.inlet.aclose()
        return [record async for record in self.out]

    @property
    def reasons(self) -> dict[str, dict[str, int]]:
        """Return the number of trajectories for each end state and reason."""
        assert self.ledger.balance().balanced
        return {state: reasons for state, reasons in self.ledger.balance().reasons.items() if reasons}


def metrics(context: Context) -> dict[str, float]:
    emitted = context.metrics.emit(1).items()
    return {name.removeprefix("assembler/"): value for name, value in emitted if name.startswith("assembler/")}


# -- what leaves whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_pieces_in_any_order_make_the_same_groups_bit_for_bit(seed: int) -> None:
    given = [each for name in "abcdef" for each in pieces(name)]
    given = [given[place] for place in np.random.default_rng(seed).permutation(len(given))]

    out = await drive(GroupAssembler(SIZE, stragglers="wait"), given)

    assert sorted(each.instance_id for each in out) == list("abcdef")
    for each in out:
        each.validate()
        assert contents(each) == contents(whole(each.instance_id))


async def test_groups_leave_in_the_order_in_which_they_became_whole() -> None:
    first, second, third = pieces("a"), pieces("b"), whole("c")

    out = await drive(GroupAssembler(SIZE, stragglers="wait"), [*first[:2], *second, third, first[2]])

    assert [each.instance_id for each in out] == ["b", "c", "a"]


async def test_a_group_that_comes_whole_passes_as_it_is() -> None:
    given = whole("a")

    (out,) = await drive(GroupAssembler(SIZE, stragglers="wait"), [given])

    assert out is given


async def test_pieces_of_several_repetitions_are_joined_by_their_lowest() -> None:
    given = [piece("a", 1), piece("a", 0, 2)]

    (out,) = await drive(GroupAssembler(SIZE, stragglers="wait"), given)

    assert out.rollout_ids.tolist() == [0, 2, 1]
    assert out.rewards.tolist() == [0, 2, 1]
    assert [row.tokens.tolist() for row in out] == [whole("a")[s].tokens.tolist() for s in (0, 2, 1)]


async def test_versions_by_token_and_by_sequence_join_as_versions_by_token() -> None:
    plain, changed = piece("a", 0, 1), piece("a", 2, policy_versions=np.arange(18))

    (out,) = await drive(GroupAssembler(SIZE, stragglers="wait"), [changed, plain])

    assert out.policy_versions.tolist() == [0] * 14 + [14, 15, 16, 17]


async def test_of_meta_that_differs_that_of_the_lowest_repetition_counts() -> None:
    given = [piece("a", 2, meta={"host": "z", "worker": 2}), piece("a", 0, 1, meta={"host": "a"})]

    (out,) = await drive(GroupAssembler(SIZE, stragglers="wait"), given)

    assert out.meta == {"host": "a", "worker": 2}


def test_waiting_pieces_are_copied_so_that_their_slots_are_free() -> None:
    assembling = Assembling(GroupAssembler(SIZE, stragglers="wait"))
    given = piece("a", 0)
    watched = weakref.ref(given.tokens)

    async def play() -> None:
        nonlocal given
        await assembling.feed(given)
        del given
        await anyio.wait_all_tasks_blocked()
        assert watched() is None
        await assembling.feed(piece("a", 1, 2))
        assert contents(assembling.sent()[0]) == contents(whole("a"))

    assembling.run(play)


# -- deadlines -------------------------------------------------------------------------------------------------------


def test_a_group_leaves_at_its_deadline_while_nothing_arrives() -> None:
    assembling = Assembling(GroupAssembler(SIZE, deadline_s=60, stragglers="shrink"))

    async def play() -> None:
        await assembling.feed(piece("a", 0))
        await anyio.sleep(20)
        await assembling.feed(piece("b", 0), piece("a", 2))
        await anyio.sleep(39.9)
        assert assembling.sent() == []
        assert names([await assembling.out.receive()]) == [("a", [0, 2])]
        assert assembling.clock.now_s == pytest.approx(60)
        assert names([await assembling.out.receive()]) == [("b", [0])]
        assert assembling.clock.now_s == pytest.approx(80)
        await anyio.sleep(3600)

    assembling.run(play)


@pytest.mark.parametrize(
    ("stragglers", "left", "reasons"),
    [("drop", [], {"filtered": {"incomplete at its deadline": 2}}), ("shrink", [("a", [0, 2])], {})],
)
def test_an_incomplete_group_is_dropped_or_truncated_at_its_deadline(
    stragglers: Any, left: list[Any], reasons: dict[str, Any]
) -> None:
    assembling = Assembling(GroupAssembler(SIZE, deadline_s=60, stragglers=stragglers))

    async def play() -> None:
        await assembling.feed(piece("a", 2), piece("a", 0))
        await anyio.sleep(61)
        assert names(assembling.sent()) == left
        assert assembling.reasons == reasons
        await assembling.feed(piece("a", 1))
        assert await assembling.rest() == []

    assembling.run(play)
    assert assembling.reasons == reasons | {"rejected": {"came after its group had left": 1}}
    assert assembling.ledger.in_flight == sum(len(repetitions) for _, repetitions in left)


def test_with_wait_an_incomplete_group_waits_for_ever() -> None:
    assembling = Assembling(GroupAssembler(SIZE, stragglers="wait"))

    async def play() -> None:
        await assembling.feed(piece("a", 0))
        await anyio.sleep(80_000)
        await assembling.feed(piece("a", 1, 2))
        assert names(assembling.sent()) == [("a", [0, 1, 2])]

    assembling.run(play)


def test_time_spent_waiting_for_credit_does_not_count() -> None:
    assembling = Assembling(GroupAssembler(SIZE, deadline_s=60, stragglers="drop"), room=1)

    async def play() -> None:
        await assembling.feed(piece("a", 0))
        await anyio.sleep(50)
        await assembling.feed(whole("b"), whole("c"), piece("a", 1))
        await anyio.sleep(30)  # the trainer is busy, and two groups wait for room
        assert names(assembling.sent()) == [("b", [0, 1, 2])]
        await anyio.sleep(9)
        await assembling.feed(piece("a", 2))
        await anyio.wait_all_tasks_blocked()
        assert names([await assembling.out.receive() for _ in range(2)]) == [("c", [0, 1, 2]), ("a", [0, 1, 2])]

    assembling.run(play)


@pytest.mark.parametrize("stragglers", ["drop", "shrink", "wait"])
async def test_at_the_end_of_the_stream_what_is_incomplete_is_treated_alike(stragglers: Any) -> None:
    deadline_s = None if stragglers == "wait" else 60.0

    out = await drive(GroupAssembler(SIZE, deadline_s, stragglers), [piece("a", 0), piece("b", 0, 1), piece("a", 2)])

    assert names(out) == ([("a", [0, 2]), ("b", [0, 1])] if stragglers == "shrink" else [])
    expected = {} if stragglers == "shrink" else {"incomplete at the end of the stream": 4}
    assert out.ledger.balance().reasons["filtered"] == expected


# -- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stragglers", ["drop", "shrink"])
async def test_the_group_that_has_waited_longest_makes_way(stragglers: Any) -> None:
    given = [piece("a", 0), piece("b", 0), piece("c", 0), piece("a", 1), piece("c", 1, 2), piece("b", 1, 2)]

    out = await drive(GroupAssembler(SIZE, 60, stragglers, max_groups=2), given)

    evicted = [("a", [0])] if stragglers == "shrink" else []
    assert names(out) == [*evicted, ("c", [0, 1, 2]), ("b", [0, 1, 2])]
    assert out.ledger.balance().reasons["rejected"] == {"came after its group had left": 1}
    dropped = {} if stragglers == "shrink" else {"incomplete when others needed its room": 1}
    assert out.ledger.balance().reasons["filtered"] == dropped


async def test_bytes_are_bounded_as_groups_are() -> None:
    nbytes = piece("a", 0).nbytes
    given = [piece("a", 0), piece("b", 0), piece("c", 0), piece("b", 1, 2), piece("c", 1, 2)]

    out = await drive(GroupAssembler(SIZE, stragglers="wait", max_bytes=2 * nbytes), given)

    assert names(out) == [("b", [0, 1, 2]), ("c", [0, 1, 2])]


async def test_a_group_too_large_for_the_buffer_evicts_no_other() -> None:
    nbytes = piece("a", 0).nbytes
    large = group(instance_id="large", completion_lengths=[400])
    given = [piece("a", 0), large, piece("a", 1, 2)]

    out = await drive(GroupAssembler(SIZE, stragglers="wait", max_bytes=2 * nbytes), given)

    assert names(out) == [("a", [0, 1, 2])]
    assert out.ledger.balance().reasons["filtered"] == {"incomplete when others needed its room": 1}


# -- copies, late pieces and wrong repetitions -----------------------------------------------------------------------


def test_a_copy_of_a_waiting_piece_is_rejected_and_not_merged() -> None:
    assembling = Assembling(GroupAssembler(SIZE, stragglers="wait"))

    async def play() -> None:
        await assembling.feed(piece("a", 0), piece("a", 1))
        await assembling.inlet.send(piece("a", 0, 1).with_rewards([9, 9]))
        await assembling.feed(piece("a", 2))
        assert contents(assembling.sent()[0]) == contents(whole("a"))

    assembling.run(play)
    assert assembling.reasons == {"rejected": {"duplicate": 2}}
    assert assembling.ledger.in_flight == 3


def test_of_a_piece_that_came_in_part_the_rest_is_taken() -> None:
    assembling = Assembling(GroupAssembler(SIZE, stragglers="wait"))

    async def play() -> None:
        await assembling.feed(piece("a", 0))
        await assembling.feed(piece("a", 0, 1))
        await assembling.inlet.send(piece("a", 1, 2))
        await anyio.wait_all_tasks_blocked()
        assert contents(assembling.sent()[0]) == contents(whole("a"))

    assembling.run(play)
    assert assembling.reasons == {"rejected": {"in flight already": 1, "duplicate": 1}}


def test_what_comes_again_when_its_group_has_left_is_late_and_begins_nothing() -> None:
    assembling = Assembling(GroupAssembler(SIZE, stragglers="wait"))

    async def play() -> None:
        await assembling.feed(*pieces("a"))
        (left,) = assembling.sent()
        await assembling.feed(piece("a", 0))  # in flight: the edge stops it
        assembling.ledger.end(left, "stale", "for a test")
        await assembling.feed(*pieces("a"))
        assert await assembling.rest() == []

    assembling.run(play)
    assert assembling.reasons == {
        "stale": {"for a test": 3},
        "rejected": {"in flight already": 1, "came after its group had left": 3},
    }


async def test_a_repetition_that_its_group_does_not_have_is_rejected() -> None:
    out = await drive(GroupAssembler(2, stragglers="wait"), [whole("a")])

    assert names(out) == [("a", [0, 1])]
    assert out.ledger.balance().reasons["rejected"] == {"a repetition beyond the size of its group": 1}


async def test_pieces_with_different_columns_are_rejected_by_name_and_the_run_goes_on() -> None:
    scored = piece("a", 0).with_advantages([1.0])

    with structlog.testing.capture_logs() as logs:
        out = await drive(GroupAssembler(SIZE, stragglers="wait"), [scored, piece("a", 1, 2), whole("b")])

    assert names(out) == [("b", [0, 1, 2])]
    assert out.ledger.balance().reasons["rejected"] == {"its pieces have different columns": 3}
    (event,) = logs
    assert event["event"] == "pieces_differ"
    assert (event["group"], event["repetitions"]) == (("test", "a"), [0, 1, 2])
    assert "missing ['advantages']" in event["error"]


# -- metrics, and invalid arguments ----------------------------------------------------------------------------------


def test_everything_that_happens_is_counted() -> None:
    assembling = Assembling(GroupAssembler(SIZE, deadline_s=60, stragglers="shrink", max_groups=2))

    async def play() -> None:
        await assembling.feed(whole("a"), piece("b", 0), piece("c", 0), piece("d", 0))
        await assembling.inlet.send(piece("d", 0))
        await assembling.feed(piece("b", 1, 2))
        emitted = metrics(assembling.context)
        assert emitted.pop("pending_bytes") == piece("c", 0).nbytes + piece("d", 0).nbytes
        assert emitted == {
            "whole": 1,
            "evicted": 1,
            "truncated_groups": 1,
            "duplicate": 1,
            "late": 2,
            "pending_groups": 2,
        }
        await anyio.sleep(60)
        await assembling.feed(piece("e", 0))
        await assembling.rest()
        assert (
            metrics(assembling.context).items()
            >= {"overdue": 2, "left_over": 1, "truncated_groups": 3, "pending_groups": 0}.items()
        )

    assembling.run(play)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0, "stragglers": "wait"}, "group_size: expected a whole number of at least 1, got 0"),
        (
            {"group_size": 2, "stragglers": "wait", "max_groups": 0},
            "max_groups: expected a whole number of at least 1, got 0",
        ),
        (
            {"group_size": 2, "stragglers": "wait", "max_bytes": 0},
            "max_bytes: expected a whole number of at least 1, got 0",
        ),
        ({"group_size": 2, "stragglers": "kill"}, "stragglers: expected one of drop, shrink, wait, got 'kill'"),
        ({"group_size": 2}, "deadline_s: expected seconds with stragglers='drop', got None"),
        ({"group_size": 2, "deadline_s": float("nan")}, "deadline_s: expected a finite number above 0, got nan"),
        ({"group_size": 2, "deadline_s": 9, "stragglers": "wait"}, "deadline_s: expected none with stragglers='wait'"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupAssembler(**options)


# -- in a pipeline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scattered:
    """Sends its trajectories one by one, in any order, some of them twice, and some never."""

    prompts: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        sent = list(itertools.product(range(self.prompts), range(SIZE)))
        sent.remove((0, 1))
        sent += sent[::4]
        for place in np.random.default_rng(0).permutation(len(sent)):
            prompt, repetition = sent[place]
            await outbox.send(piece(chr(prompt + ord("a")), repetition))


class Counting:
    def step(self, _: TrainBatch, /) -> dict[str, float]:
        return {}


class Stuck:
    async def run(self, _: ReceiveChannel[TrajectoryGroup], /) -> None:
        await anyio.sleep_forever()


@dataclass(frozen=True)
class Running:
    """A source that runs a fragment, as one in a process does."""

    fragment: Source[TrajectoryGroup]

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        await self.fragment.run(outbox)


@pytest.mark.parametrize("in_a_fragment", [False, True])
async def test_what_comes_in_any_order_twice_or_never_is_trained_whole_and_once(*, in_a_fragment: bool) -> None:
    assembled = source(Scattered(20)).then(GroupAssembler(SIZE, stragglers="wait"))
    flow = source(Running(assembled)) if in_a_fragment else assembled

    report = await flow.then(Batcher(max_tokens=640)).sink(SinkTrainer(Counting())).run()

    assert report.stop_reason == "end of stream"
    assert report.balance.ended == {
        "trained": 57,
        "filtered": 2,
        "rejected": 15,
        "stale": 0,
        "failed": 0,
        "lost": 0,
        "unfinished": 0,
    }
    assert report.balance.admitted == 59 + 15


def test_spread_over_processes_it_is_refused_before_anything_starts() -> None:
    assembler = GroupAssembler(SIZE, stragglers="wait")

    source(source(Scattered(1)).then(assembler), on=processes(2)).sink(Stuck()).check()
    source(Scattered(1)).then(assembler, on=processes(1)).sink(Stuck()).check()
    with pytest.raises(InvalidPipeline, match="GroupAssembler: it has to see every record, and in 2 processes"):
        source(Scattered(1)).then(assembler, on=processes(2)).sink(Stuck()).check()
