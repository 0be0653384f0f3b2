"""A journal's folder: volumes that grow, are read again and are deleted; its bounds, its lock, a disk that is full."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import TrajectoryGroup
from penstock._pipeline.channels.socket_directory import sweep
from penstock._pipeline.durability.journal import JournalFiles, open_journal
from penstock._pipeline.durability.journal_entry import encode_entry
from penstock.errors import JournalFull, JournalInUse, ProtocolMismatch
from penstock.testing import group

RECORDS = [group(instance_id=str(number), seed=number) for number in range(20)]
ENTRY_BYTES = len(encode_entry(RECORDS[0]))


@contextmanager
def journal(folder: Path, *, entries: float = 1000, fsync: bool = False) -> Iterator[JournalFiles]:
    """Open a journal with a capacity of so many of the records above; a file holds an eighth of it."""
    with open_journal(folder, capacity_bytes=int(entries * ENTRY_BYTES), fsync=fsync) as files:
        yield files


def names(records: Sequence[TrajectoryGroup]) -> list[int]:
    return [int(record.instance_id) for record in records]


def test_the_records_are_of_one_size() -> None:
    assert {len(encode_entry(record)) for record in RECORDS} == {ENTRY_BYTES}


def test_records_that_one_run_appends_are_read_by_the_next_in_order(tmp_path: Path) -> None:
    with journal(tmp_path, entries=16) as files:
        for first in range(0, 9, 3):
            files.append(RECORDS[first : first + 3])

    with journal(tmp_path) as files:
        assert [names(files.read(volume).records) for volume in files.volumes] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert files.nbytes == 9 * ENTRY_BYTES


def test_a_volume_grows_up_to_an_eighth_of_the_capacity_and_a_run_begins_its_own(tmp_path: Path) -> None:
    written = []
    for _ in range(2):
        with journal(tmp_path, entries=80) as files:
            written.append([files.append([record]).number for record in RECORDS[:15]])

    assert written == [[1] * 10 + [2] * 5, [3] * 10 + [4] * 5]


def test_only_its_owner_reads_a_volume(tmp_path: Path) -> None:
    with journal(tmp_path) as files:
        volume = files.append(RECORDS)

    assert volume.path.stat().st_mode & 0o777 == 0o600


def test_beyond_its_capacity_nothing_is_written_and_the_error_names_the_remedy(tmp_path: Path) -> None:
    with journal(tmp_path, entries=8) as files:
        volumes = [files.append([record]) for record in RECORDS[:8]]
        with pytest.raises(
            JournalFull, match=r"got \d+ on top of \d+, .* \(checkpoint_every\), or raise capacity_bytes"
        ):
            files.append(RECORDS[8:9])
        files.delete(volumes[:1])
        files.append(RECORDS[8:9])

    with journal(tmp_path) as files:
        assert [names(files.read(volume).records) for volume in files.volumes] == [[n] for n in range(1, 9)]


def test_a_journal_in_a_folder_that_is_named_like_one_of_sockets_is_left_alone_when_those_of_the_dead_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "penstock-run"
    with journal(folder) as files:
        files.append(RECORDS[:3])

    sweep()

    with journal(folder) as files:
        assert [names(files.read(volume).records) for volume in files.volumes] == [[0, 1, 2]]


def test_a_deleted_volume_that_was_growing_is_followed_by_a_new_one(tmp_path: Path) -> None:
    with journal(tmp_path) as files:
        files.delete([files.append(RECORDS[:1])])
        assert list(tmp_path.glob("*.volume-1")) == []
        files.append(RECORDS[1:2])

    with journal(tmp_path) as files:
        assert names(files.read(files.volumes[0]).records) == [1]


def test_a_torn_end_of_the_newest_volume_is_cut_off(tmp_path: Path) -> None:
    with journal(tmp_path) as files:
        volume = files.append(RECORDS[:3])
    os.truncate(volume.path, 3 * ENTRY_BYTES - 7)

    with journal(tmp_path) as files:
        reading = files.read(files.volumes[0])
        assert names(reading.records) == [0, 1]
        assert reading.torn == (2 * ENTRY_BYTES, 3 * ENTRY_BYTES - 7)
        assert not reading.damage
        assert files.nbytes == 2 * ENTRY_BYTES
    assert volume.path.stat().st_size == 2 * ENTRY_BYTES


def test_the_end_of_an_older_volume_is_damaged_not_torn_and_stays(tmp_path: Path) -> None:
    for record in RECORDS[:2]:
        with journal(tmp_path) as files:
            files.append([record])
    os.truncate(tmp_path / "00000001.volume-1", 7)

    with journal(tmp_path) as files:
        older, newest = map(files.read, files.volumes)

    assert (older.records, older.damage, older.torn) == ([], [(0, 7)], None)
    assert (names(newest.records), newest.damage, newest.torn) == ([1], [], None)


def test_a_folder_has_one_process_which_the_error_of_another_names(tmp_path: Path) -> None:
    with (
        journal(tmp_path),
        pytest.raises(JournalInUse, match=rf"got process {os.getpid()} \(.+\): let it end, or give this run"),
        journal(tmp_path),
    ):
        pass
    with journal(tmp_path):
        pass


def test_a_folder_that_was_left_by_an_exception_is_free_again(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), journal(tmp_path):
        raise ZeroDivisionError
    with journal(tmp_path):
        pass


def test_volumes_of_another_version_are_refused_and_other_files_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with journal(tmp_path) as files:
        files.append(RECORDS[:1])
    (tmp_path / "00000001.volume-1").rename(tmp_path / "00000001.volume-2")

    with (
        pytest.raises(ProtocolMismatch, match=r"expected volumes of version 1 in .*, got 00000001.volume-2"),
        journal(tmp_path),
    ):
        pass

    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("fsync", [True, False])
def test_with_fsync_records_and_names_are_on_the_disk_when_append_returns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fsync: bool,  # noqa: FBT001 (a parameter)
) -> None:
    synced: list[tuple[str, int]] = []

    def note(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink().name, os.fstat(fd).st_size))

    monkeypatch.setattr(os, "fsync", note)
    with journal(tmp_path, fsync=fsync) as files:
        files.append(RECORDS[:2])
        files.append(RECORDS[2:3])

    volumes = [each for each in synced if each[0] == "00000001.volume-1"]
    assert volumes == (
        [("00000001.volume-1", 2 * ENTRY_BYTES), ("00000001.volume-1", 3 * ENTRY_BYTES)] if fsync else []
    )
    assert [name for name, _ in synced if name == tmp_path.name] == ([tmp_path.name] if fsync else [])


FULL = """
import resource, sys
import anyio
from penstock import Journal, source
from penstock.testing import group

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)

class Samples:
    async def run(self, outbox):
        for number in range(20):
            await outbox.send(group(instance_id=str(number), seed=number))

class Take:
    async def run(self, inbox):
        async for record in inbox:
            print("passed", record.instance_id)

pipeline = source(Samples()).then(Journal(sys.argv[1])).sink(Take())
try:
    anyio.run(pipeline.run)
except Exception as error:
    print(type(error.__cause__).__name__, error.__cause__)
print(pipeline.report.stop_reason, pipeline.report.balance.balanced)
"""


ROOMS = [
    *(0, 7, 5 * ENTRY_BYTES + ENTRY_BYTES // 2),
    *(pytest.param(room, marks=pytest.mark.long) for room in (1, ENTRY_BYTES - 1, ENTRY_BYTES)),
]


@pytest.mark.parametrize("room", ROOMS)
def test_a_full_disk_ends_the_run_with_a_reason_and_sent_records_stay_whole(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # traces could not be written either

    ran = subprocess.run([sys.executable, "-c", FULL, tmp_path, str(room)], capture_output=True, text=True, check=True)

    *passed, error, stop_reason = ran.stdout.splitlines()
    assert error.startswith("JournalFull expected room for")
    assert f"in {tmp_path}, got none (File too large): make room there, or lower capacity_bytes" in error
    assert stop_reason.startswith("Journal raised JournalFull")
    assert stop_reason.endswith("True")
    with journal(tmp_path) as files:
        readings = list(map(files.read, files.volumes))
    kept = [n for reading in readings for n in names(reading.records)]
    assert [reading for reading in readings if reading.damage or reading.torn] == []
    assert kept == list(range(len(kept)))  # records of the same write are not in the file either
    assert {f"passed {n}" for n in kept} >= set(passed)
