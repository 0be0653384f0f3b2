"""Resume a run from its folder: run again with the same folder, it continues from its last checkpoint.

    <folder>/checkpoints/step-00000100/    written by the sink's trainer
    <folder>/metrics.jsonl                 one line for each step
    <folder>/samples.jsonl                 samples of what some steps trained
    <folder>/lock                          is locked while a process runs in the folder
    <folder>/config.json                   the configuration; see `run_changes`

Stages take part by optional methods: the sink by `with_checkpoints`, any other stage that begins differently in a
resumed run by `resume_from`, and a stage with state by `state_dict` and `load_state_dict`. The content of a checkpoint
is left to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..._schemas import GroupId
from ..accounting.telemetry import get_logger
from ..errors import InvalidPipeline, RunInUse
from ..graph.context import Context
from ..graph.stage_node import StageNode
from ..trackers.jsonl import Jsonl
from ..trackers.tracker import RunInfo
from ..util.atomic_file import remove_unfinished
from ..util.checkpoint import latest_checkpoint, settle_checkpoints, step_of
from ..util.lock_file import LockFile, is_locked
from ..util.os_errors import explaining_os_errors
from .run_changes import RunPart

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints in that of a run."""

LOCK = "lock"
"""The file that a process locks while it runs in the folder."""

log = get_logger("penstock.pipeline")


class ResumePoint(NamedTuple):
    """The progress of a run before it is resumed."""

    step: int
    """Optimizer steps; 0 for a run that begins."""
    committed: Mapping[GroupId, int]
    """The trajectories that they trained, as `Ledger.committed`."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state that a resumed run needs, such as the running statistics of an AdvantageNormalizer."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state, as JSON values; floats are restored bit for bit."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Restore a state that `state_dict` returned."""
        ...


@runtime_checkable
class WithCheckpoints(Protocol):
    """A sink that a run in a folder can be resumed with."""

    def with_checkpoints(self, folder: Path, gathering: Mapping[str, Stateful], /) -> tuple[Any, ResumePoint]:
        """Return the same sink with checkpoints in `folder`, resumed from the last one, and the progress of that one.

        Args:
            folder: holds the checkpoints; the run has verified the last one.
            gathering: stages whose state checkpoints are to hold, by name.
        """
        ...


@runtime_checkable
class Resumes(Protocol):
    """A stage that begins differently in a resumed run."""

    def resume_from(self, point: ResumePoint, /) -> Any:
        """Return the stage to run instead."""
        ...


class StageSnapshot:
    """The state of a stage when `take` was last called: a checkpoint is written while the stage goes on."""

    def __init__(self, stage: Stateful) -> None:
        self._stage = stage
        self._taken: Mapping[str, Any] = {}
        self.take()

    def take(self) -> None:
        """Record the present state of the stage."""
        self._taken = dict(self._stage.state_dict())

    def state_dict(self) -> Mapping[str, Any]:
        """See `Stateful`."""
        return self._taken

    def load_state_dict(self, state: Any, /) -> None:
        """See `Stateful`."""
        self._stage.load_state_dict(state)


@contextmanager
def with_checkpoints(
    folder: Path,
    nodes: Sequence[StageNode],
    context: Context,
    config: Mapping[str, Any],
    *,
    allow_changes: bool,
    skip_damaged: bool,
) -> Iterator[tuple[StageNode, ...]]:
    """Lock `folder` for the run within the body; yield the resumed stages, to run instead of `nodes`. Blocks.

    The ledger, the metrics and the samples of `context` continue too. Their lines are written at once, unlike those of
    other trackers: no checkpoint is newer than the files, and a run whose folder takes no more lines ends.

    Raises:
        InvalidPipeline: the sink writes no checkpoints.
        CheckpointDamaged: the last checkpoint is not as it was written, and `skip_damaged` is false or none is whole.
        RunDiffers: the run in the folder has other data or another model, and `allow_changes` is false.
        RunInUse: another process runs in `folder`.
        DiskFull, NotWritable, OutOfFileDescriptors: the folder or its file of metrics cannot be written.
    """
    with _locked(folder):
        remove_unfinished(folder)
        settle_checkpoints(folder / CHECKPOINTS, skip_damaged=skip_damaged)
        nodes, point = _opened(folder, nodes, config, allow_changes=allow_changes)
        if point.step:
            context.ledger.restore(point.committed, point.step)
        files = Jsonl()
        files.start(RunInfo(name=folder.name, folder=folder, step=point.step))
        context.metrics.file = files.log
        context.sample_sinks.append(files.samples)
        try:
            yield tuple(nodes)
        finally:
            context.metrics.file = None
            context.sample_sinks.remove(files.samples)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make `folder` if it does not exist, and hold its lock."""
    with explaining_os_errors("the files of a run", folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = LockFile(folder / LOCK)
    try:
        if not lock.take():
            raise RunInUse(
                f"expected one run at a time in {folder}, got a second one beside {lock.holder}: end the other, or "
                f"take another folder"
            )
        yield
    finally:
        lock.close()


def is_running(folder: Path) -> bool:
    """Return whether a process runs in `folder`. Opens files only to read; blocks.

    Raises:
        OSError: there is no such folder, or it was never that of a run, or it cannot be read.
    """
    return is_locked(folder / LOCK)


def _opened(
    folder: Path, nodes: Sequence[StageNode], config: Mapping[str, Any], *, allow_changes: bool
) -> tuple[tuple[StageNode, ...], ResumePoint]:
    """Compare the run with its folder before anything is read into a stage, and return its stages, resumed."""
    *before, last = nodes
    if not isinstance(last.stage, WithCheckpoints):
        raise InvalidPipeline(
            f"{last.name}: expected a sink that writes checkpoints (SinkTrainer) for a run in a folder"
        )
    gathering = {node.name: node.stage for node in before if not node.remote and isinstance(node.stage, Stateful)}
    part = RunPart(config, nodes)
    latest = latest_checkpoint(folder / CHECKPOINTS)
    part.compare(folder, 0 if latest is None else step_of(latest), allow_changes=allow_changes)
    sink, point = last.stage.with_checkpoints(folder / CHECKPOINTS, gathering)
    with explaining_os_errors("the configuration of a run", folder):
        part.write(folder, point.step)
    if point.step:
        log.info("run_resumed", folder=str(folder), step=point.step)
    return (*resumed(before, point), replace(last, stage=sink)), point


def resumed(nodes: Sequence[StageNode], point: ResumePoint) -> tuple[StageNode, ...]:
    """Return the same nodes, with their stages resumed from `point`."""
    return tuple(
        replace(node, stage=node.stage.resume_from(point)) if isinstance(node.stage, Resumes) else node
        for node in nodes
    )
