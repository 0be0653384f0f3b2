"""Journal as a stage: it writes a record before it sends it, and sends it again in a later run until it has ended."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
import structlog
from tests.failsafe import FAILSAFE_S

from penstock import (
    Context,
    GroupId,
    Journal,
    ReceiveChannel,
    SendChannel,
    SinkTrainer,
    TrainBatch,
    TrajectoryGroup,
    each,
    processes,
    source,
)
from penstock.accounting import Ledger
from penstock.channels import memory_channel
from penstock.errors import InvalidPipeline, JournalFull, JournalInUse, StageFailed
from penstock.testing import drive, entered, group

RECORDS = [group(instance_id=str(number), seed=number) for number in range(20)]


def _bytes_of(record: TrajectoryGroup) -> int:
    """Return the bytes that a journal writes for `record`."""
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(drive, Journal(folder), [record])
        (volume,) = Path(folder).glob("*.volume-1")
        return volume.stat().st_size


ENTRY_BYTES = _bytes_of(RECORDS[0])


def names(records: Sequence[TrajectoryGroup]) -> list[int]:
    return [int(record.instance_id) for record in records]


def volumes(folder: Path) -> list[str]:
    return sorted(path.name[:8] for path in folder.glob("*.volume-1"))


@dataclass(frozen=True)
class Samples:
    count: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in range(self.count):
            await outbox.send(group(instance_id=str(number), seed=number))


async def packed(record: TrajectoryGroup) -> TrainBatch:
    return TrainBatch.pack([record])


class Stuck:
    async def run(self, _: ReceiveChannel[TrajectoryGroup], /) -> None:
        await anyio.sleep_forever()


class Counting:
    """A trainer that only seems to write checkpoints."""

    steps = 0
    committed: Mapping[GroupId, int] = {}

    def step(self, _: TrainBatch, /) -> dict[str, float]:
        return {}

    def save(self, folder: Path, _: Mapping[GroupId, int], /) -> Path:
        return folder


class Run:
    """A journal within a run, fed by the test, with the run's ledger."""

    def __init__(self, folder: Path, ledger: Ledger | None = None, **options: Any) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.context = Context(ledger=self.ledger)
        self._journal = Journal(folder, **options)
        self.feed, self._inbox = memory_channel[TrajectoryGroup](100)
        self._outbox, self.out = memory_channel[TrajectoryGroup](100)

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        with entered(self.context):
            self._tasks.start_soon(self._run)
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.feed.close()
        await self._tasks.__aexit__(None, None, None)
        self.out.close()
        self._inbox.close()

    async def _run(self) -> None:
        async with self._outbox:
            await self._journal.run(self._inbox, self._outbox)

    async def passes(self, *records: TrajectoryGroup) -> list[TrajectoryGroup]:
        """Admit and send `records`, and return as many."""
        for record in records:
            self.ledger.admit(record.id, record.rollout_ids.tolist())
            await self.feed.send(record)
        return [await self.out.receive() for _ in records]

    async def rest(self) -> list[TrajectoryGroup]:
        """Return all records until the end of the stream."""
        self.feed.close()
        return [record async for record in self.out]

    def commit(self, *records: TrajectoryGroup) -> None:
        self.ledger.commit(TrainBatch.pack(records), self.ledger.step + 1)

    def checkpoint(self) -> None:
        self.ledger.announce_checkpoint(self.ledger.committed)


def restored(*records: TrajectoryGroup) -> Ledger:
    ledger = Ledger()
    ledger.restore({record.id: sum(1 << bit for bit in record.rollout_ids.tolist()) for record in records}, 1)
    return ledger


# -- offering again ------------------------------------------------------------------------------------------------


async def test_records_pass_as_they_are_and_in_order(tmp_path: Path) -> None:
    out = await drive(Journal(tmp_path), RECORDS)

    assert all(passed is given for passed, given in zip(out, RECORDS, strict=True))


async def test_received_records_are_offered_again_bit_for_bit_before_new_ones(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:9])

    out = await drive(Journal(tmp_path), RECORDS[9:])

    assert names(out) == list(range(20))
    for again, given in zip(out, RECORDS, strict=True):
        assert again.header() == given.header()
        assert {n: c.tobytes() for n, c in again.columns().items()} == {
            n: c.tobytes() for n, c in given.columns().items()
        }
    assert out.ledger.in_flight == 40
    assert out.metrics.emit(1)["journal/replayed"] == 18


async def test_records_in_a_checkpoint_are_not_offered_again(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:4])

    async with Run(tmp_path, restored(RECORDS[0], RECORDS[2])) as run:
        assert names(await run.rest()) == [1, 3]
        assert run.ledger.balance().in_flight == 4


async def test_of_a_group_that_a_checkpoint_holds_in_part_the_rest_is_offered_again(tmp_path: Path) -> None:
    whole = group(completion_lengths=[3, 4, 5])
    ledger = Ledger()
    ledger.restore({whole.id: 0b010}, 1)
    await drive(Journal(tmp_path), [whole])

    async with Run(tmp_path, ledger) as run:
        (again,) = await run.rest()

    assert again.rollout_ids.tolist() == [0, 2]
    assert again.completion_lengths().tolist() == [3, 5]


async def test_without_a_checkpoint_everything_is_offered_as_often_as_a_run_begins(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:3])

    for _ in range(2):
        assert names(await drive(Journal(tmp_path), [])) == [0, 1, 2]


# -- sources that offer again ----------------------------------------------------------------------------------------


async def test_a_record_of_both_the_journal_and_its_source_is_trained_once(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:3])

    pipeline = source(Samples(5)).then(Journal(tmp_path)).then(each(packed)).sink(SinkTrainer(Counting()))
    report = await pipeline.run()

    assert report.balance.ended["trained"] == 10
    assert set(report.balance.reasons["rejected"]) <= {"in flight already", "trained already"}
    assert report.balance.in_flight == report.balance.ended["lost"] == 0


async def test_a_record_that_its_source_sent_first_is_not_offered_again(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:3])

    out = await drive(Journal(tmp_path), RECORDS[:5])  # all of it is in the ledger before the journal is read

    assert names(out) == [0, 1, 2, 3, 4]
    assert out.ledger.balance().in_flight == 10
    assert out.metrics.emit(1)["journal/replayed"] == 0


async def test_a_trained_record_is_rejected_when_its_source_sends_it_again(tmp_path: Path) -> None:
    """By the checkpoint, and by this run after the journal had offered it."""
    await drive(Journal(tmp_path), RECORDS[:2])

    async with Run(tmp_path, restored(RECORDS[0])) as run:
        run.commit(await run.out.receive())
        for record in RECORDS[:3]:
            if not run.ledger.hand_over(record):  # as from a worker
                await run.feed.send(record)
        assert names(await run.rest()) == [2]

    assert run.ledger.balance().reasons["rejected"] == {"trained already": 4}
    assert run.ledger.balance().balanced


async def test_records_dropped_since_may_be_sent_again(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:1])

    async with Run(tmp_path) as run:
        run.ledger.end(await run.out.receive(), "filtered", "for a test")
        assert names(await run.passes(RECORDS[0])) == [0]


# -- room ------------------------------------------------------------------------------------------------------------


async def test_a_file_goes_when_a_checkpoint_holds_or_the_ledger_dropped_all_that_is_in_it(tmp_path: Path) -> None:
    async with Run(tmp_path, capacity_bytes=2**16) as run:
        per_volume = 2**13 // ENTRY_BYTES + 1
        first = [(await run.passes(record))[0] for record in RECORDS[:per_volume]]
        await run.passes(RECORDS[-1])
        assert volumes(tmp_path) == ["00000001", "00000002"]

        run.commit(*first[1:])
        await run.passes(RECORDS[-2])
        assert volumes(tmp_path) == ["00000001", "00000002"]  # trained, but in no checkpoint

        run.checkpoint()
        await run.passes(RECORDS[-3])
        assert volumes(tmp_path) == ["00000001", "00000002"]  # the first is in flight

        run.ledger.end(first[0], "filtered", "for a test")
        run.checkpoint()
        await run.passes(RECORDS[-4])
        assert volumes(tmp_path) == ["00000002"]


async def test_records_trained_after_the_announced_checkpoint_are_kept(tmp_path: Path) -> None:
    async with Run(tmp_path) as run:
        one, two = await run.passes(*RECORDS[:2])
        run.commit(one)
        held = run.ledger.committed
        run.commit(two)
        run.ledger.announce_checkpoint(held)
        await run.passes(RECORDS[2])

    async with Run(tmp_path, restored(RECORDS[0])) as run:
        assert names(await run.rest()) == [1, 2]


async def test_a_file_of_which_a_checkpoint_holds_everything_goes_at_the_next_start(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:2])

    async with Run(tmp_path, restored(*RECORDS[:2])) as run:
        assert await run.rest() == []

    assert volumes(tmp_path) == []


async def test_a_record_that_does_not_fit_is_not_sent_on(tmp_path: Path) -> None:
    fitting = 2**16 // ENTRY_BYTES
    many = [group(instance_id=str(number), seed=0) for number in range(fitting + 1)]

    async with Run(tmp_path, capacity_bytes=2**16) as run:
        assert len(await run.passes(*many[:60])) == 60
    with pytest.raises(JournalFull, match="let SinkTrainer write checkpoints more often"):
        await drive(Journal(tmp_path, capacity_bytes=2**16), many[60:])

    assert len(await drive(Journal(tmp_path, capacity_bytes=2**16), [])) in range(60, fitting + 1)


async def test_a_trainer_that_writes_checkpoints_keeps_the_journal_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path, capacity_bytes=2**16)
    sink = SinkTrainer(Counting(), checkpoints=tmp_path, checkpoint_every=10)
    pipeline = source(Samples(400)).then(journal).then(each(packed)).sink(sink)

    report = await pipeline.run()

    assert 400 * ENTRY_BYTES > 4 * 2**16
    assert report.balance.ended["trained"] == 800
    assert report.stop_reason == "end of stream"


# -- at its edges ----------------------------------------------------------------------------------------------------


async def test_a_record_that_was_passed_on_is_let_go_of(tmp_path: Path) -> None:
    """It may lie in a producer's slots, and the next one may be long in coming."""
    record = group()
    watched = weakref.ref(record.tokens)

    async with Run(tmp_path) as run:
        await run.passes(record)
        del record
        await anyio.wait_all_tasks_blocked()
        assert watched() is None


async def test_damage_is_reported_and_every_whole_record_offered(tmp_path: Path) -> None:
    await drive(Journal(tmp_path), RECORDS[:5])
    path = tmp_path / "00000001.volume-1"
    harmed = bytearray(path.read_bytes())
    harmed[ENTRY_BYTES + 300] ^= 1
    path.write_bytes(harmed[:-1])

    with structlog.testing.capture_logs() as logs:
        out = await drive(Journal(tmp_path), [])

    assert names(out) == [0, 2, 3]
    assert out.metrics.emit(1)["journal/damaged_bytes"] == ENTRY_BYTES
    by_event = {each["event"]: each for each in logs}
    assert by_event["journal_damaged"] == {
        "event": "journal_damaged",
        "log_level": "error",
        "path": str(path),
        "at": ENTRY_BYTES,
        "bytes": ENTRY_BYTES,
    }
    assert by_event["journal_tail_truncated"]["log_level"] == "warning"
    assert by_event["journal_tail_truncated"]["bytes"] == ENTRY_BYTES - 1


async def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with Run(tmp_path) as run:
        await run.passes(RECORDS[0])
        with pytest.raises(JournalInUse, match="give this run a folder of its own"):
            await drive(Journal(tmp_path), [])


def test_in_a_worker_a_journal_is_refused_before_anything_starts(tmp_path: Path) -> None:
    pipeline = source(Samples(0)).then(Journal(tmp_path), on=processes(1)).sink(Stuck())

    with pytest.raises(InvalidPipeline, match="a Journal runs in the trainer's process: leave out on=processes"):
        pipeline.check()


def test_a_capacity_that_holds_next_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity_bytes: expected a whole number of at least 65536, got 1"):
        Journal(tmp_path, capacity_bytes=1)


async def test_a_folder_that_cannot_be_had_ends_the_run_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with anyio.fail_after(FAILSAFE_S), pytest.raises(StageFailed, match="Journal raised NotADirectoryError"):
        await source(Samples(9)).then(Journal(tmp_path / "file" / "journal")).sink(Stuck()).run()


async def test_a_write_that_fails_for_another_reason_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int, __: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", broken)

    with pytest.raises(OSError, match="Input/output error"):
        await drive(Journal(tmp_path), RECORDS[:1])


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Saving(Counting):
    """Notes what has been announced when it saves; its second checkpoint fails."""

    def __init__(self, announced: list[Mapping[GroupId, int]]) -> None:
        self._announced = announced
        self.seen: list[int] = []

    def save(self, folder: Path, _: Mapping[GroupId, int], /) -> Path:
        self.seen.append(len(self._announced))
        if len(self.seen) == 2:
            raise OSError(28, "No space left on device")
        return folder


async def test_a_checkpoint_is_announced_when_it_is_on_the_disk_and_not_before(tmp_path: Path) -> None:
    announced: list[Mapping[GroupId, int]] = []
    trainer, ledger = Saving(announced), Ledger()
    batches, inbox = memory_channel[TrainBatch](3)
    for record in RECORDS[:3]:
        ledger.admit(record.id, [0, 1])
        await batches.send(TrainBatch.pack([record]))
    batches.close()

    async with inbox:
        with (
            entered(Context(ledger=ledger)),
            ledger.on_checkpoint(announced.append),
            pytest.raises(OSError, match="No space left"),
        ):
            await SinkTrainer(trainer, checkpoints=tmp_path, checkpoint_every=1).run(inbox)

    assert trainer.seen == [0, 1]
    assert announced == [{RECORDS[0].id: 0b11}]


async def test_a_rollout_with_branches_is_sent_again_as_one_rollout(tmp_path: Path) -> None:
    branched = group(completion_lengths=[2] * 3, rollout_ids=[0, 0, 1])
    await drive(Journal(tmp_path), [branched])

    sent = await drive(Journal(tmp_path), [])

    assert [record.rollout_ids.tolist() for record in sent] == [[0, 0, 1]]
    assert sent.ledger.balance().admitted == 2
