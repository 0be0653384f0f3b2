"""The files of a journal: a folder of volumes to which records are appended, and from which they are read again.

A *volume* is an append-only file of entries; only the newest grows, and one whose every trajectory has ended is
deleted. Every run begins a volume of its own. One process at a time has the folder. Blocks, so it is used in a thread;
one thread at a time. Knows no ledger: who calls it knows what has ended.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..schemas import ProtocolMismatch, TrajectoryGroup
from .appending import append_whole
from .errors import JournalFull, JournalInUse
from .journal_entry import CorruptRange, encode_entry, read_entries
from .os_errors import explaining_os_errors

__all__ = ["JournalFiles", "LogContents", "LogFile", "open_journal"]

VOLUME_BYTES = 32 * 2**20
"""From this size on a volume grows no more: it is read in one piece, and deleted in one piece."""

VOLUMES = 8
"""So many volumes at least fit a journal, for room is made by whole ones."""

VERSION = 1
"""Of the entries; it stands in the name of every volume."""

NAME = re.compile(r"(\d{8})\.volume-(\d+)")

OFFERED_AGAIN = "or lower capacity_bytes and checkpoint_every; what was written before will be offered again"


@dataclass(slots=True, eq=False)
class LogFile:
    """One file."""

    number: int
    """Volumes are numbered in the order in which they were begun."""
    path: Path
    nbytes: int


class LogContents(NamedTuple):
    """What a volume holds."""

    records: list[TrajectoryGroup]
    damage: list[CorruptRange]
    """Between the records: what was written there can not be read again."""
    torn: CorruptRange | None
    """At the end of the newest volume: what was being written when the process died. It has been cut off."""


class JournalFiles:
    """A journal's folder, which nobody else has; see `open_journal`."""

    def __init__(self, folder: Path, *, capacity_bytes: int, fsync: bool) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._fsync = fsync
        self.volumes = _volumes(folder)
        """Oldest first."""
        self._fd: int | None = None
        """The volume that grows, the last one; None before the first record of this run and behind a full volume."""

    def __repr__(self) -> str:
        return f"<JournalFiles {self._folder}: {self.nbytes} bytes in {len(self.volumes)} volumes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all volumes."""
        return sum(volume.nbytes for volume in self.volumes)

    def read(self, volume: LogFile) -> LogContents:
        """All that can be read again of `volume`, which was written by a run before this one."""
        found = list(read_entries(volume.path.read_bytes()))
        records = [each for each in found if isinstance(each, TrajectoryGroup)]
        damage = [each for each in found if isinstance(each, CorruptRange)]
        torn = damage.pop() if damage and found[-1] is damage[-1] and volume is self.volumes[-1] else None
        if torn is not None:
            os.truncate(volume.path, torn.first)
            volume.nbytes = torn.first
        return LogContents(records, damage, torn)

    def append(self, records: Sequence[TrajectoryGroup]) -> LogFile:
        """Write `records`, all of them or none, and tell where to. With `fsync` they are on the disk then.

        Raises:
            JournalFull: they would bring the journal beyond its capacity, or the disk has no room.
            NotWritable, OutOfFileDescriptors: they could not be written for another reason.
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
        """Everything in `volumes` has ended."""
        for volume in volumes:
            if volume is self.volumes[-1]:
                self._close_volume()
            volume.path.unlink(missing_ok=True)
            self.volumes.remove(volume)

    def close(self) -> None:
        """Write no more."""
        self._close_volume()

    def _write(self, entries: list[bytes], nbytes: int) -> LogFile:
        if self._fd is not None and self.volumes[-1].nbytes >= min(VOLUME_BYTES, self._capacity_bytes // VOLUMES):
            self._close_volume()
        fd = self._begin_volume() if self._fd is None else self._fd
        volume = self.volumes[-1]
        append_whole(fd, entries)  # nothing of what was not passed on stays behind
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
            _sync_folder(self._folder)
        return self._fd

    def _close_volume(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextmanager
def open_journal(folder: Path, *, capacity_bytes: int, fsync: bool) -> Iterator[JournalFiles]:
    """The journal in `folder`, which is made where there is none; nobody else has it within the body. Blocks.

    Raises:
        JournalInUse: another process has it, or this one a second time.
        ProtocolMismatch: another version of penstock wrote it.
        JournalFull: the disk has no room.
        NotWritable, OutOfFileDescriptors: the folder cannot be used.
    """
    with ExitStack() as stack:
        with _writing("the lock of a journal", folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)  # which unlocks it, as the death of this process would
            _take(lock, folder)
        files = JournalFiles(folder, capacity_bytes=capacity_bytes, fsync=fsync)
        stack.callback(files.close)
        yield files


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace")
        raise JournalInUse(
            f"expected nobody else to write to the journal in {folder}, got process {owner}: let it end, or give this "
            f"run a folder of its own"
        ) from None
    owner = str(os.getpid())
    os.ftruncate(lock, 0)
    os.pwrite(lock, owner.encode(), 0)


def _writing(what: str, folder: Path) -> AbstractContextManager[None]:
    return explaining_os_errors(what, folder, disk_full=JournalFull, or_else=OFFERED_AGAIN)


def _volumes(folder: Path) -> list[LogFile]:
    found = []
    for path in folder.iterdir():
        if (name := NAME.fullmatch(path.name)) is None:
            continue
        if int(name[2]) != VERSION:
            raise ProtocolMismatch(
                f"expected volumes of version {VERSION} in {folder}, got {path.name}: let the penstock that wrote it "
                f"train what it holds, or move it away"
            )
        found.append(LogFile(int(name[1]), path, path.stat().st_size))
    return sorted(found, key=lambda volume: volume.number)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
