"""The best checkpoint of a run: a link in the folder of the checkpoints, and a record of its metric.

    checkpoints/best         -> step-00000040
    checkpoints/best.json    {"metric": "eval/gsm8k/mean@1", "value": 0.41, "step": 40, "evaluated": 60, "checksum": …}

Both are replaced atomically, and read again whenever they are needed, so that a run that was killed goes on with them.
Does not read the contents of a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..._pipeline.util.atomic_file import link_atomically
from ..._pipeline.util.checkpoint import INTACT, checkpoint_of
from ..._pipeline.util.json_file import read_json_or_set_aside, write_json
from ..._pipeline.util.os_errors import explaining_os_errors

LINK, RECORD = "best", "best.json"


class BestCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best checkpoint of a run, as in best.json."""

    metric: str
    """The metric that it has the highest value of."""
    value: float | None = None
    """Its value; None before the first evaluation with a value."""
    step: int = -1
    """The optimizer step of the checkpoint; −1 before the first."""
    evaluated: int = -1
    """The last step with a known evaluation; −1 before the first."""


def best_checkpoint(folder: str | Path) -> BestCheckpoint | None:
    """Return the record of the best checkpoint in `folder`; None if no step was evaluated.

    A record that cannot be read is set aside.
    """
    consequence = "the best checkpoint is chosen from the evaluations that follow"
    return read_json_or_set_aside(Path(folder) / RECORD, BestCheckpoint, consequence=consequence)


def record_evaluation(folder: Path, metric: str, step: int, value: float | None) -> None:
    """Record that the evaluation of `step` found `value`; link its checkpoint if that is the best. Blocks.

    Raises:
        DiskFull, NotWritable, OutOfFileDescriptors: the files cannot be written; the earlier ones are whole.
    """
    best = best_checkpoint(folder)
    if best is None or best.metric != metric:
        best = BestCheckpoint(metric=metric)
    best = msgspec.structs.replace(best, evaluated=step)
    if value is not None and checkpoint_of(folder, step) is not None and (best.value is None or value > best.value):
        best = msgspec.structs.replace(best, step=step, value=value)
    with explaining_os_errors("which checkpoint is the best", folder, or_else=INTACT):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, best)
        link_best(folder)


def rewind_best(folder: Path, step: int) -> None:
    """Forget the evaluations of steps after `step`: a run that resumes there trains them again. Blocks.

    Raises: see `record_evaluation`.
    """
    best = best_checkpoint(folder)
    if best is None or best.evaluated <= step:
        return
    known = best if best.step <= step else BestCheckpoint(metric=best.metric)
    with explaining_os_errors("which checkpoint is the best", folder, or_else=INTACT):
        write_json(folder / RECORD, msgspec.structs.replace(known, evaluated=step))


def link_best(folder: Path) -> None:
    """Link the checkpoint of the best step: its name changes if the step is saved again. Blocks."""
    best = best_checkpoint(folder)
    if best is None or (checkpoint := checkpoint_of(folder, best.step)) is None:
        return
    link = folder / LINK
    if not link.is_symlink() or link.readlink().name != checkpoint.name:
        link_atomically(link, checkpoint.name)
