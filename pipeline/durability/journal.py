"""The files of a journal: a folder of volumes that records are appended to and read from again.

A *volume* is an append-only file of entries; only the newest grows, and a volume whose trajectories have all ended is
deleted. Every run begins a new volume. One process at a time has the folder. Blocks, so it is used in a thread; one
thread at a time. Knows no ledger: the caller knows the trajectories that have ended.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..._schemas import TrajectoryGroup
from ..errors import JournalFull, JournalInUse
from ..util.appending import append_whole
from ..util.atomic_file import sync_to_disk
from ..util.lock_file import LockFile
from ..util.os_errors import explaining_os_errors
from .journal_entry import CorruptRange, encode_entry, read_entries
from .numbered_files import numbered_files

VOLUME_BYTES = 32 * 2**20
"""A volume of this size grows no more: a volume is read as a whole, and deleted as a whole."""

VOLUMES = 8
"""The least number of volumes that fit a journal: space is freed by whole volumes."""

VERSION = 1
"""The version of the entries, part of the name of every volume."""

NAME = re.compile(r"(\d{8})\.volume-(\d+)")

REMEDY = "or lower capacity_bytes and checkpoint_every; records that were written before will be replayed"


@dataclass(slots=True, eq=False)
class LogFile:
    """One volume."""

    number: int
    """Its place in the order of the volumes."""
    path: Path
    nbytes: int


class LogContents(NamedTuple):
    """The content of a volume."""

    records: list[TrajectoryGroup]
    damage: list[CorruptRange]
    """Ranges between the records that cannot be read."""
    torn: CorruptRange | None
    """An incomplete entry at the end of the newest volume, whose writer died; it was truncated."""


class JournalFiles:
    """The folder of a journal, locked for this object; see `open_journal`."""

    def __init__(self, folder: Path, *, capacity_bytes: int, fsync: bool) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._fsync = fsync
        self.volumes = _volumes(folder)
        """Oldest first."""
        self._fd: int | None = None
        """Descriptor of the volume that grows; None before the first record of this run and after a full one."""

    def __repr__(self) -> str:
        return f"<JournalFiles {self._folder}: {self.nbytes} bytes in {len(self.volumes)} volumes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all volumes."""
        return sum(volume.nbytes for volume in self.volumes)

    def read(self, volume: LogFile) -> LogContents:
        """Return the readable content of `volume`, which an earlier run wrote."""
        found = list(read_entries(volume.path.read_bytes(), TrajectoryGroup))
        records = [each for each in found if isinstance(each, TrajectoryGroup)]
        damage = [each for each in found if isinstance(each, CorruptRange)]
        torn = damage.pop() if damage and found[-1] is damage[-1] and volume is self.volumes[-1] else None
        if torn is not None:
            os.truncate(volume.path, torn.first)
            volume.nbytes = torn.first
        return LogContents(records, damage, torn)

    def append(self, records: Sequence[TrajectoryGroup]) -> LogFile:
        """Write `records`, all or none, and return their volume. With `fsync` they are on the disk afterwards.

        Raises:
            JournalFull: they would bring the journal beyond its capacity, or the disk has no room.
            NotWritable, OutOfFileDescriptors: they cannot be written for another reason.
        """
        entries = [encode_entry(record) for record in records]
        nbytes = sum(map(len, entries))
        if self.nbytes + nbytes > self._capacity_bytes:
            raise JournalFull(
                f"expected at most {self._capacity_bytes} bytes in {self._folder} (capacity_bytes of this journal), "
                f"got {nbytes} on top of {self.nbytes}, whose trajectories no checkpoint holds yet: let SinkTrainer "
                f"write checkpoints more often (checkpoint_every), or raise capacity_bytes"
            )
        with _writing(f"{nbytes} bytes", self._folder):
            return self._write(entries, nbytes)

    def delete(self, volumes: Iterable[LogFile]) -> None:
        """Delete `volumes`: all their trajectories have ended."""
        for volume in volumes:
            if volume is self.volumes[-1]:
                self.close()
            volume.path.unlink(missing_ok=True)
            self.volumes.remove(volume)

    def _write(self, entries: list[bytes], nbytes: int) -> LogFile:
        if self._fd is not None and self.volumes[-1].nbytes >= min(VOLUME_BYTES, self._capacity_bytes // VOLUMES):
            self.close()
        fd = self._begin_volume() if self._fd is None else self._fd
        volume = self.volumes[-1]
        append_whole(fd, entries)  # records that are not sent on leave nothing in the file
        volume.nbytes += nbytes
        if self._fsync:
            os.fsync(fd)
        return volume

    def _begin_volume(self) -> int:
        number = self.volumes[-1].number + 1 if self.volumes else 1
        path = self._folder / f"{number:08d}.volume-{VERSION}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.volumes.append(LogFile(number, path, 0))
        if self._fsync:
            sync_to_disk(self._folder)
        return self._fd

    def close(self) -> None:
        """Close the volume that grows; the next record begins another one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextmanager
def open_journal(folder: Path, *, capacity_bytes: int, fsync: bool) -> Iterator[JournalFiles]:
    """Lock the journal in `folder` within the body; it is created if need be. Blocks.

    Raises:
        JournalInUse: another process has locked it, or this one has already.
        ProtocolMismatch: another version of penstock wrote it.
        JournalFull: the disk has no room.
        NotWritable, OutOfFileDescriptors: the folder cannot be used.
    """
    with ExitStack() as stack:
        with _writing("the lock of a journal", folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = LockFile(folder / "lock", mode=0o600)
            stack.callback(lock.close)
            if not lock.take():
                raise JournalInUse(
                    f"expected no other process to write to the journal in {folder}, got {lock.holder}: let it end, or "
                    f"give this run a folder of its own"
                )
        files = JournalFiles(folder, capacity_bytes=capacity_bytes, fsync=fsync)
        stack.callback(files.close)
        yield files


def _writing(what: str, folder: Path) -> AbstractContextManager[None]:
    return explaining_os_errors(what, folder, disk_full=JournalFull, or_else=REMEDY)


def _volumes(folder: Path) -> list[LogFile]:
    remedy = "let the penstock that wrote it train what it holds, or move it away"
    files = numbered_files(folder, NAME, VERSION, "volumes", remedy)
    return [LogFile(number, path, path.stat().st_size) for number, path in files]
