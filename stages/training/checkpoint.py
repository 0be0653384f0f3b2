"""Folders that are there whole or not at all: one a checkpoint, named after its optimizer step.

A checkpoint is written under a temporary name, brought to the disk file by file, and renamed. A machine that loses its
power on the way leaves the checkpoints before. One that is removed loses its name first, then its files. Knows nothing
about what is in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ...pipeline.os_errors import explaining_os_errors

__all__ = ["FOLDER_SCHEME", "latest_checkpoint", "remove_old_checkpoints", "write_checkpoint"]

FOLDER_SCHEME = "file://"
"""How the URL of a folder begins."""

PREFIX = "step-"
UNFINISHED = ".unfinished-"

WHOLE = "then run again: what was written there before is whole"


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Make the checkpoint of `step` in `folder` and return its path. `write` fills the directory it is given. Blocks.

    One that is there already, of a run that went on from an earlier step, is replaced.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: the files cannot be written; those before are whole, and nothing of
            this one takes room.
    """
    with explaining_os_errors(f"the files of step {step}", folder, or_else=WHOLE):
        return _write_checkpoint(folder, step, write)


def _write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(UNFINISHED + "*"):
        shutil.rmtree(left_over)
    unfinished = folder / f"{UNFINISHED}{step}"
    try:
        _fill(unfinished, write)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # what has no room now may have it then
        raise
    finished = folder / f"{PREFIX}{step:08d}"
    if finished.exists():
        finished.rename(folder / f"{UNFINISHED}{step}-replaced")
    unfinished.rename(finished)
    _to_disk(folder)
    shutil.rmtree(folder / f"{UNFINISHED}{step}-replaced", ignore_errors=True)
    return finished


def _fill(unfinished: Path, write: Callable[[Path], None]) -> None:
    unfinished.mkdir()
    write(unfinished)
    for path in [*unfinished.iterdir(), unfinished]:
        _to_disk(path)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint of the highest step in `folder`, or None where there is none."""
    return max(Path(folder).glob(PREFIX + "*"), key=_step_of, default=None)


def remove_old_checkpoints(folder: Path, newest: Path, keep: int) -> None:
    """Remove all checkpoints in `folder` but `newest`, just written, and the `keep` of the highest steps. Blocks.

    Raises:
        NotWritable, OutOfFileDescriptors: they cannot be removed.
    """
    with explaining_os_errors("which checkpoints are kept", folder, or_else=WHOLE):
        oldest_first = sorted(folder.glob(PREFIX + "*"), key=_step_of)
        removed = [_renamed(old) for old in oldest_first[:-keep] if old.name != newest.name]
        _to_disk(folder)
        for old in removed:
            shutil.rmtree(old)


def _renamed(old: Path) -> Path:
    """Take its name from a checkpoint; `write_checkpoint` sweeps what a kill leaves of it."""
    return old.rename(old.with_name(f"{UNFINISHED}{_step_of(old)}-removed"))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _to_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
