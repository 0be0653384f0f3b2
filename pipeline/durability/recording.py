"""The files of a recording: a folder with the batches that a run trained, one file for each optimizer step.

    <folder>/00000001.batch-2

A file is one entry, encoded as in a journal, and the number of its step, so that one under the name of another step is
refused. It is written as a whole before its step. The weights decide: a run that resumes first deletes the batches of
the steps that its checkpoint lacks, because it will train others there. Knows no ledger and no trainer. Blocks, so it
is used in a thread.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from ..._schemas import TrainBatch
from ..errors import FileDamaged, NoRecording
from ..util.atomic_file import remove_unfinished, write_atomically
from ..util.os_errors import explaining_os_errors
from ..util.regular_file import open_regular
from .journal_entry import HEAD_BYTES, encode_entry, entry_of_head, read_entries
from .numbered_files import numbered_files

RECORDING = "recording"
"""The folder of the recording in that of a run."""

VERSION = 2
"""The version of the files, part of the name of each."""

STEP = struct.Struct("<Q")
"""The step, behind the entry."""

NAME = re.compile(r"(\d{8,})\.batch-(\d+)")


def begin_recording(folder: Path, step: int) -> None:
    """Make `folder` if need be, and delete the batches after `step`, the last one that the weights contain.

    Raises:
        DiskFull, NotWritable: the folder cannot be made or changed.
        ProtocolMismatch: another version of penstock wrote it.
    """
    with explaining_os_errors("the recording of a run", folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        for _, path in (each for each in _batches(folder) if each[0] > step):
            path.unlink()


def record_batch(folder: Path, step: int, batch: TrainBatch) -> None:
    """Write the batch that `step` is about to train; afterwards it is on the disk.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: it cannot be written.
    """
    path = _file(folder, step)
    with explaining_os_errors(f"the batch of step {step}", folder, or_else="or continue without record"):
        write_atomically(path, encode_entry(batch) + STEP.pack(step))


def recorded_batch(folder: Path, step: int) -> TrainBatch:
    """Return the batch that `step` trained.

    Raises:
        FileDamaged: its file is missing, cannot be read, or is not as it was written.
    """
    path = _file(folder, step)
    try:
        data = _entry(path, step)
    except OSError as error:
        raise _damaged(path, step, _reason(error)) from error
    (found, *more) = read_entries(data, TrainBatch)
    if more or not isinstance(found, TrainBatch):
        raise _damaged(path, step, "other bytes")
    return found


def recorded_steps(folder: Path) -> int:
    """Return the last step of the recording in `folder`, which has all steps from the first one on.

    Raises:
        NoRecording: there is no batch, or not that of the first step.
        FileDamaged: that of a later step is missing.
        ProtocolMismatch: another version of penstock wrote it.
    """
    steps = [step for step, _ in _batches(folder)] if folder.is_dir() else []
    if not steps or steps[0] != 1:
        got = f"those from step {steps[0]} on" if steps else "none"
        raise NoRecording(
            f"expected batches of a run from its first step on in {folder}, got {got}: train that run with record: true"
        )
    for step, found in enumerate(steps, start=1):
        if step != found:
            raise _damaged(_file(folder, step), step, "no such file")
    return steps[-1]


def identity_of_recording(folder: Path) -> str:
    """Return the checksum of the first batch, by which a continued replay knows its recording.

    Raises:
        FileDamaged: its file is missing, cannot be read, or is not as it was written.
    """
    path = _file(folder, 1)
    try:
        with open_regular(path) as file:
            entry = entry_of_head(file.read(HEAD_BYTES))
    except OSError as error:
        raise _damaged(path, 1, _reason(error)) from error
    if entry is None:
        raise _damaged(path, 1, "other bytes")
    return entry[1]


def _entry(path: Path, step: int) -> bytes:
    """Return the entry of the file of `step`, if it has the size that its head gives; no other is read into memory."""
    with open_regular(path) as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(HEAD_BYTES)
        entry = entry_of_head(head)
        if entry is None or entry[0] + STEP.size != size:
            return b"?"
        data = head + file.read(entry[0] - HEAD_BYTES)
        return data if file.read() == STEP.pack(step) else b"?"


def _reason(error: OSError) -> str:
    return "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)


def _damaged(path: Path, step: int, got: str) -> FileDamaged:
    before = f", or replay the steps before it (--step {step - 1})" if step > 1 else ""
    return FileDamaged(f"{path}: expected the batch of step {step} as it was written, got {got}: restore it{before}")


def _file(folder: Path, step: int) -> Path:
    return folder / f"{step:08d}.batch-{VERSION}"


def _batches(folder: Path) -> list[tuple[int, Path]]:
    return numbered_files(folder, NAME, VERSION, "batches", "replay them with the penstock that wrote them")
