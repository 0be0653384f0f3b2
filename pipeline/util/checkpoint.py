"""Checkpoints as folders that are written atomically, named after their optimizer step.

A checkpoint is written under a temporary name, synced to the disk with a manifest of its files, and renamed. After a
power failure the earlier checkpoints are intact. A run that resumes verifies the newest one first. Removal renames a
checkpoint, then deletes its files. A second checkpoint of the same step is named `step-00000100.2`, so that the first
is kept until the second is complete: few file systems can replace a folder atomically. Knows files, not their contents.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ..._schemas.numbers import whole_number
from ..errors import CheckpointDamaged
from .atomic_file import sync_to_disk
from .json_file import set_aside
from .manifest import MANIFEST, damage_of, write_manifest
from .os_errors import explaining_os_errors

FOLDER_SCHEME = "file://"
"""Scheme of the URL of a folder."""

WEIGHTS = "model.safetensors"
"""The file of a model's weights in a checkpoint, as transformers names it."""

PREFIX = "step-"
UNFINISHED = ".unfinished-"

NAME = re.compile(PREFIX + r"(\d{8,})(?:\.(\d+))?")
"""The name of a checkpoint: its step, and its number among those of the step if that is not 1."""

INTACT = "then run again: what was written there before is whole"


def write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Write the checkpoint of `step` into `folder` and return its path. `write` fills a given directory. Blocks.

    An existing checkpoint of the same step is removed when the new one is complete.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: the files cannot be written; earlier checkpoints are intact, and
            the files of this one are removed.
    """
    step = whole_number("step", step, least=0)
    with explaining_os_errors(f"the files of step {step}", folder, or_else=INTACT):
        return _write_checkpoint(folder, step, write)


def _write_checkpoint(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(UNFINISHED + "*"):
        shutil.rmtree(left_over)
    same_step = [path for path in _folders(folder) if step_of(path) == step]
    finished = folder / _name(step, 1 + max((_order(path)[1] for path in same_step), default=0))
    write_folder(finished, folder / f"{UNFINISHED}{step}", write)
    _remove(folder, same_step)
    return finished


def write_folder(path: Path, unfinished: Path, write: Callable[[Path], None]) -> None:
    """Make the folder at `path`, where there is none or an empty one: `write` fills it under the name `unfinished`.

    Raises:
        OSError: it cannot be written; the files under `unfinished` are removed.
    """
    try:
        unfinished.mkdir()
        write(unfinished)
        write_manifest(unfinished)
        sync_to_disk(unfinished)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)  # makes room for another attempt
        raise
    sync_to_disk(path.parent)


def settle_checkpoints(folder: Path, *, skip_damaged: bool) -> None:
    """Verify the newest checkpoint in `folder`, before a run resumes from it. Blocks.

    1. Folders that were never completed, without a manifest, are set aside if they are empty or a whole checkpoint is
       left.
    2. Damaged checkpoints are an error; with `skip_damaged` they are set aside too, if a whole one is left.

    Raises:
        CheckpointDamaged: a file is not as it was written, or no checkpoint is whole.
        OSError: a folder cannot be renamed.
    """
    damaged: dict[Path, str] = {}
    whole = None
    for checkpoint in sorted(_folders(folder), key=_order, reverse=True):
        if (damage := damage_of(checkpoint)) is None:
            whole = checkpoint
            break
        damaged[checkpoint] = damage
    for checkpoint, damage in damaged.items():
        if _is_error(checkpoint, whole, skip_damaged=skip_damaged):
            raise CheckpointDamaged(_explained(checkpoint, damage, whole))
    for checkpoint, damage in damaged.items():
        set_aside(checkpoint, damage, f"the run goes on from {whole.name if whole else 'its beginning'}")


def verify_checkpoint(checkpoint: str | Path, needed: Callable[[str], bool] = lambda _: True) -> None:
    """Compare the files of a checkpoint with its manifest. Blocks.

    Args:
        checkpoint: a folder that `write_checkpoint` returned.
        needed: takes the name of a file; returns whether to verify it.

    Raises:
        CheckpointDamaged: a file is not as it was written.
    """
    path = Path(checkpoint)
    if (damage := damage_of(path, needed)) is not None:
        raise CheckpointDamaged(_explained(path, damage, whole=None))


def verify_if_listed(folder: Path, needed: Callable[[str], bool]) -> bool:
    """Compare files in `folder` with its manifest, and return whether it has one; other programs write none. Blocks.

    Args:
        folder: a model, perhaps a checkpoint or an exported one.
        needed: see `verify_checkpoint`.

    Raises:
        CheckpointDamaged: a file is not as it was written.
    """
    listed = (folder / MANIFEST).is_file()
    if listed:
        verify_checkpoint(folder, needed)
    return listed


def _is_error(checkpoint: Path, whole: Path | None, *, skip_damaged: bool) -> bool:
    if (checkpoint / MANIFEST).exists():
        return not skip_damaged or whole is None
    return whole is None and _has_files(checkpoint)


def _explained(checkpoint: Path, damage: str, whole: Path | None) -> str:
    remedy = f"restore it from a copy (or remove {MANIFEST} if the file was changed on purpose)"
    if whole is not None:
        remedy = f"{whole.name} before it is whole: continue from that with skip_damaged=true, or {remedy}"
    return f"{checkpoint}: expected the files that were written, got damage: {damage}: {remedy}"


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the highest step in `folder`, or None if there is none. Its files are not verified."""
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
    """Return the checkpoints in `folder`. An empty folder is not one."""
    return [path for path in _folders(folder) if _has_files(path)]


def _folders(folder: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint, those that were never completed included."""
    return [path for path in folder.glob(PREFIX + "*") if NAME.fullmatch(path.name) and path.is_dir()]


def _name(step: int, edition: int) -> str:
    return f"{PREFIX}{step:08d}" + (f".{edition}" if edition > 1 else "")


def _has_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:  # it was removed meanwhile
        return False


def _order(checkpoint: Path) -> tuple[int, int]:
    """Return the step of a checkpoint, and its number among those of the step, from 1."""
    match = NAME.fullmatch(checkpoint.name)
    assert match is not None  # noqa: S101 (found by its name)
    return int(match[1]), int(match[2] or 1)


def _remove(folder: Path, checkpoints: list[Path]) -> None:
    removed = [_renamed(old) for old in checkpoints]
    sync_to_disk(folder)
    for old in removed:
        shutil.rmtree(old)


def _renamed(old: Path) -> Path:
    """Rename a checkpoint for removal; `write_checkpoint` deletes it if this process is killed."""
    return old.rename(old.with_name(f"{UNFINISHED}{old.name.removeprefix(PREFIX)}-removed"))
