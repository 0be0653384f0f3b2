"""Checkpoints as folders that are written atomically, named after their optimizer step.

A checkpoint is written under a temporary name, synced to the disk file by file, and renamed. After a power failure the
earlier checkpoints are intact. Removal renames a checkpoint first, then deletes its files. A second checkpoint of the
same step is named `step-00000100.2`, so that the first is kept until the second is complete: few file systems can
replace a folder atomically. Knows nothing about the contents.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ..._pipeline.util.atomic_file import sync_to_disk
from ..._pipeline.util.os_errors import explaining_os_errors

FOLDER_SCHEME = "file://"
"""Scheme of the URL of a folder."""

WEIGHTS = "model.safetensors"
"""The file of a model's weights in a checkpoint, as transformers names it."""

PREFIX = "step-"
UNFINISHED = ".unfinished-"

INTACT = "then run again: what was written there before is whole"


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write the checkpoint of `step` into `folder` and return its path. `write` fills a given directory. Blocks.

    An existing checkpoint of the same step is removed when the new one is complete.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: the files cannot be written; earlier checkpoints are intact, and
            the files of this one are removed.
    """
    with explaining_os_errors(f"the files of step {step}", folder, or_else=INTACT):
        return _write_checkpoint(folder, step, write)


def _write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(UNFINISHED + "*"):
        shutil.rmtree(left_over)
    unfinished = folder / f"{UNFINISHED}{step}"
    try:
        _fill(unfinished, write)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # makes room for another attempt
        raise
    same_step = [path for path in _checkpoints(folder) if step_of(path) == step]
    finished = folder / _name(step, 1 + max((_order(path)[1] for path in same_step), default=0))
    unfinished.rename(finished)
    sync_to_disk(folder)
    _remove(folder, same_step)
    return finished


def _fill(unfinished: Path, write: Callable[[Path], None]) -> None:
    unfinished.mkdir()
    write(unfinished)
    for path in [*unfinished.iterdir(), unfinished]:
        sync_to_disk(path)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the highest step in `folder`, or None if there is none."""
    return max(_checkpoints(Path(folder)), key=_order, default=None)


def checkpoint_of(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of `step` in `folder`, or None if there is none."""
    return max((path for path in _checkpoints(folder) if step_of(path) == step), key=_order, default=None)


def remove_old_checkpoints(folder: Path, newest: Path, keep: int, spared: Callable[[int], bool] | None = None) -> None:
    """Remove all checkpoints in `folder` but `newest`, the `keep` with the highest steps and `spared` steps. Blocks.

    Raises:
        NotWritable, OutOfFileDescriptors: they cannot be removed.
    """
    with explaining_os_errors("which checkpoints are kept", folder, or_else=INTACT):
        oldest_first = sorted(_checkpoints(folder), key=_order)
        _remove(
            folder,
            [old for old in oldest_first[:-keep] if old.name != newest.name and not (spared and spared(step_of(old)))],
        )


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return _order(checkpoint)[0]


def _checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob(PREFIX + "*"))


def _name(step: int, edition: int) -> str:
    return f"{PREFIX}{step:08d}" + (f".{edition}" if edition > 1 else "")


def _order(checkpoint: Path) -> tuple[int, int]:
    """Return the step of a checkpoint, and its number among those of the step, from 1."""
    step, _, edition = checkpoint.name.removeprefix(PREFIX).partition(".")
    return int(step), int(edition or 1)


def _remove(folder: Path, checkpoints: list[Path]) -> None:
    removed = [_renamed(old) for old in checkpoints]
    sync_to_disk(folder)
    for old in removed:
        shutil.rmtree(old)


def _renamed(old: Path) -> Path:
    """Rename a checkpoint for removal; `write_checkpoint` deletes it if this process is killed."""
    return old.rename(old.with_name(f"{UNFINISHED}{old.name.removeprefix(PREFIX)}-removed"))
