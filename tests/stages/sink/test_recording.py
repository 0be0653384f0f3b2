"""A sink keeps each batch before its step; a `Recording` sends them again in order, and none that is damaged."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.resumption.damaged_files import DAMAGE

from penstock import Batcher, GroupId, SendChannel, SinkTrainer, TrainBatch, TrajectoryGroup, source
from penstock.accounting import CommittedPrompts
from penstock.errors import DiskFull, FileDamaged, InvalidConfig, NoRecording, ProtocolMismatch, StageFailed
from penstock.testing import group
from penstock.training import Recording, latest_checkpoint, write_checkpoint

FIRST, SECOND, THIRD = (f"{step:08d}.batch-2" for step in (1, 2, 3))


class Samples:
    """Sends groups of different columns and lengths; one is a batch."""

    def __init__(self, first: int, count: int) -> None:
        self.numbers = range(first, first + count)

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        for number in self.numbers:
            lengths = [2 + number] * 4
            await outbox.send(
                group(instance_id=str(number), seed=number, completion_lengths=lengths, meta={"δ": number})
            )


class Trainer:
    """Its weights are the bytes of its batches."""

    def __init__(self, folder: Path | None = None, *, fails_at: int = 0) -> None:
        self.trained: list[bytes] = []
        self.steps, self.committed, self.fails_at = 0, CommittedPrompts(), fails_at
        if folder is not None and (checkpoint := latest_checkpoint(folder)) is not None:
            self.trained, self.steps, committed = msgspec.msgpack.decode((checkpoint / "state").read_bytes())
            self.committed = CommittedPrompts.of_state(committed)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        if self.steps + 1 == self.fails_at:
            raise FloatingPointError("not finite")
        self.trained.append(contents(batch))
        self.steps += 1
        return {}

    def save(self, folder: Path, committed: Mapping[GroupId, int]) -> Path:
        def write(into: Path) -> None:
            state = (self.trained, self.steps, CommittedPrompts(committed).state)
            (into / "state").write_bytes(msgspec.msgpack.encode(state))

        return write_checkpoint(folder, self.steps, write)


def contents(batch: TrainBatch) -> bytes:
    columns = {name: (column.dtype.str, column.shape, column.tobytes()) for name, column in batch.columns().items()}
    return batch.header() + msgspec.msgpack.encode(columns)


def recorded(folder: Path, trainer: Trainer, count: int = 3, first: int = 0, **options: Any) -> Trainer:
    """Train batches of one group each, and record them in `folder`."""
    sink = SinkTrainer(trainer, record=folder, **options)
    anyio.run(source(Samples(first, count)).then(Batcher(max_tokens=1000, sequences=1)).sink(sink).run)
    return trainer


def replayed(folder: Path, last: int | None = None, first: int = 1) -> Trainer:
    trainer = Trainer()
    anyio.run(source(Recording(folder, last=last, first=first)).sink(SinkTrainer(trainer)).run)
    return trainer


def cause_of(folder: Path, **bounds: int) -> BaseException | None:
    with pytest.raises(StageFailed) as failed:
        replayed(folder, **bounds)
    return failed.value.__cause__


def test_a_replay_has_the_batches_of_the_run_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    run = recorded(tmp_path, Trainer())

    assert len(set(run.trained)) == 3
    assert replayed(tmp_path).trained == run.trained
    assert replayed(tmp_path, last=2).trained == run.trained[:2]
    assert replayed(tmp_path, first=3).trained == run.trained[2:]


def test_a_step_that_fails_is_recorded_too(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="not finite"):
        recorded(tmp_path, Trainer(fails_at=2))

    assert len(replayed(tmp_path).trained) == 2


def test_a_resumed_run_keeps_each_step_once_and_only_those_of_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    options: dict[str, Any] = {"checkpoints": tmp_path / "checkpoints", "checkpoint_every": 2}
    with pytest.raises(StageFailed, match="not finite"):
        recorded(folder, Trainer(fails_at=4), count=5, **options)
    assert len(list(folder.iterdir())) == 4
    (folder / f".{FIRST}.0a1b.unfinished").write_bytes(b"of a killed process")

    resumed = recorded(folder, Trainer(tmp_path / "checkpoints"), first=7, **options)

    assert resumed.steps == 5
    assert len(list(folder.iterdir())) == 5
    assert replayed(folder).trained == resumed.trained


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", [FIRST, SECOND, THIRD])
def test_a_damaged_file_is_named_with_its_step(name: str, kind: str, tmp_path: Path) -> None:
    recorded(tmp_path, Trainer())

    DAMAGE[kind](tmp_path / name)

    if kind == "absent" and name == THIRD:  # as if the run had ended before
        assert replayed(tmp_path).steps == 2
        return
    cause = cause_of(tmp_path)
    if kind == "absent" and name == FIRST:
        assert isinstance(cause, NoRecording)
        return
    assert isinstance(cause, FileDamaged)
    assert f"{name}: expected the batch of step {int(name[:8])} as it was written, got" in str(cause)


def test_every_byte_of_a_file_counts(tmp_path: Path) -> None:
    recorded(tmp_path, Trainer(), count=1)
    whole = (tmp_path / FIRST).read_bytes()
    places = [*range(64), *range(64, len(whole), 29), len(whole) - 1]

    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / FIRST).write_bytes(damaged)
        assert isinstance(cause_of(tmp_path), FileDamaged), place


OTHER_CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "more behind it": lambda whole: whole + b"\0" * 64,
    "twice": lambda whole: whole * 2,
    "a head that claims much": lambda whole: whole[:16] + (2**60).to_bytes(8, "little") + whole[24:],
    "text": lambda _: b"a text that is longer than the head of an entry",
}


@pytest.mark.parametrize("kind", OTHER_CONTENTS)
def test_other_contents_are_refused(kind: str, tmp_path: Path) -> None:
    recorded(tmp_path, Trainer(), count=2)
    path = tmp_path / SECOND
    path.write_bytes(OTHER_CONTENTS[kind](path.read_bytes()))

    assert isinstance(cause_of(tmp_path), FileDamaged)


def test_the_file_of_another_step_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, Trainer())
    (tmp_path / SECOND).rename(tmp_path / "other")
    (tmp_path / THIRD).rename(tmp_path / SECOND)
    (tmp_path / "other").rename(tmp_path / THIRD)

    cause = cause_of(tmp_path)

    assert isinstance(cause, FileDamaged)
    assert f"{SECOND}: expected the batch of step 2" in str(cause)


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("name", [FIRST, SECOND])
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_what_is_no_file_is_named_as_damage_and_not_waited_for(kind: str, name: str, tmp_path: Path) -> None:
    recorded(tmp_path, Trainer(), count=2)
    (tmp_path / name).unlink()
    IN_ITS_PLACE[kind](tmp_path / name)

    assert isinstance(cause_of(tmp_path), FileDamaged)


@pytest.mark.parametrize("name", ["000000009.batch-2", "9" * 200 + ".batch-2"])
def test_a_batch_under_a_name_of_another_length_goes_with_those_of_later_steps(name: str, tmp_path: Path) -> None:
    recorded(tmp_path, Trainer(), count=2)
    (tmp_path / SECOND).rename(tmp_path / name)

    recorded(tmp_path, Trainer(), count=2)

    assert sorted(each.name for each in tmp_path.iterdir()) == [FIRST, SECOND]


def test_a_file_of_terabytes_is_refused_and_not_read(tmp_path: Path) -> None:
    recorded(tmp_path, Trainer(), count=2)
    with (tmp_path / SECOND).open("r+b") as file:
        file.truncate(2**42)

    assert isinstance(cause_of(tmp_path), FileDamaged)


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    recorded(tmp_path, Trainer(), count=1)
    (tmp_path / FIRST).rename(tmp_path / "00000001.batch-3")

    assert isinstance(cause_of(tmp_path), ProtocolMismatch)


def test_steps_that_were_not_recorded_are_refused(tmp_path: Path) -> None:
    assert isinstance(cause_of(tmp_path / "nothing"), NoRecording)
    recorded(tmp_path, Trainer())

    cause = cause_of(tmp_path, last=4)

    assert isinstance(cause, NoRecording)
    assert str(cause) == f"expected the batches of 4 steps in {tmp_path}, got those of 3"
    with pytest.raises(InvalidConfig):
        Recording(tmp_path, last=0)


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow beyond 100 bytes within the body."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_run_before_the_step(tmp_path: Path) -> None:
    trainer = Trainer()
    with pytest.raises(StageFailed) as failed, full_disk():
        recorded(tmp_path, trainer)

    assert isinstance(failed.value.__cause__, DiskFull)
    assert "expected room for the batch of step 1 in" in str(failed.value.__cause__)
    assert not trainer.steps
    assert not list(tmp_path.iterdir())
