"""Messages between a worker and its pipeline, apart from the records.

A worker connects to the channel that it sends on, and asks for its place (`Joins`); the answer has its configuration.
Its events and reports travel with its records, instructions on the way back. Only the stage itself is pickled, for a
worker that the pipeline starts; all of these messages are decoded strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup
from ..._schemas.bounds import MOST_ENTRIES, Count, Line, Name, Signed, SmallCount, Text, Traceback
from ..._schemas.control import Repetitions
from ..accounting.epoch import UNKNOWN, Epoch
from ..accounting.telemetry import Observations
from ..graph.context import Worker
from ..graph.schedule import UNBOUNDED, Schedule

RECORDS: dict[str, type[TrajectoryGroup | TrainBatch]] = {
    record.schema.kind: record for record in (TrajectoryGroup, TrainBatch)
}
"""The record types that travel between processes, by their names in `WorkerChannels`."""


class WorkerChannels(msgspec.Struct, frozen=True, kw_only=True):
    """The channels of a stage's workers; the same for all of them."""

    outbox_url: Line
    outbox_kind: Name
    """Key of `RECORDS`."""
    inbox_kind: Name
    """Key of `RECORDS`; empty for a source. A worker serves its inbox itself."""
    inbox_capacity: Count
    """Records."""
    inbox_capacity_bytes: Count
    remote_url: Line = ""
    """The URL for workers on other hosts; empty where all run on this one."""
    key: Name = ""
    """The key of the run's tcp channels, in hexadecimal digits."""
    host: Name = ""
    """`host_identity` of the parent."""
    assigned: bool = False
    """True if the workers of a source are assigned their prompts."""
    schedule: Schedule = UNBOUNDED
    """That of the pipeline."""

    @property
    def told_to_leave(self) -> bool:
        """Return whether a worker can end without losing work: it is fed, or assigned its prompts."""
        return bool(self.inbox_kind) or self.assigned


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one start of a worker."""

    name: Line
    """`SourceEnv 2/4`."""
    stage: Line
    """`SourceEnv`."""
    worker: Worker
    channels: WorkerChannels


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that a process needs before it has connected, on its command line."""

    name: Line
    """`SourceEnv 2/4`."""
    stage: Line
    """`SourceEnv`."""
    outbox_url: Line
    outbox_kind: Name
    """Key of `RECORDS`."""
    parent: SmallCount
    """Process id of the parent."""
    payload: SmallCount
    """Descriptor of the pickled stage."""
    watched: SmallCount
    """Descriptor of the file for its start and the watch on its event loop."""


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The worker has connected; its stage begins."""

    transport: Name
    """`shm` or `tcp`."""
    pid: SmallCount
    node: Name
    """The address of its host; empty on the host of the pipeline."""
    numa: Text = ""
    """`node 1`, if it is bound to that one there, or the reason why it is not."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The worker of a middle stage serves its inbox: records may be sent to this URL."""

    url: Line


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The stage returned, and the receiver has all records that it sent."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The stage raised."""

    error: Text
    """`raised ValueError: the message`."""
    traceback: Traceback
    """Empty for an error of penstock, whose message says it all."""

    def message(self, reason: str) -> str:
        """Return the message of the run's error: `reason`, and after an empty line the traceback, if there is one."""
        return f"{reason}\n\nIn the worker:\n\n{self.traceback}" if self.traceback else reason


class Joins(msgspec.Struct, frozen=True, tag=True):
    """A worker has connected, and asks for its place."""

    digest: Name = ""
    """The digest of the configuration or script of its stage, where it makes the stage itself."""


class Wants(msgspec.Struct, frozen=True, tag=True):
    """The worker has room for another prompt."""


class Leaves(msgspec.Struct, frozen=True, tag=True):
    """The worker completes its present work, and takes no more."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """The worker ends before its stage is done, for the reason."""

    reason: Text


class Dies(msgspec.Struct, frozen=True, tag=True):
    """The worker ends its process, for the reason."""

    reason: Text
    """`did not run its event loop for 310 s, it was at …`."""


WorkerEvent = Connected | Serving | Finished | Failed | Joins | Wants | Leaves | Left | Dies
"""The events that a worker sends with its records."""


class KeylessAddress(msgspec.Struct, frozen=True):
    """A `WeightAddress` without its key, which a worker has already."""

    url: Line
    local: Line
    host: Name
    generation: Count
    trusted_link: bool


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The worker has a place, and begins."""

    config: StageConfig
    step: Count
    """The last optimizer step."""
    weights: KeylessAddress | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The worker gets no place."""

    reason: Text


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """The worker samples these prompts."""

    prompts: Annotated[tuple[tuple[GroupId, Repetitions], ...], Meta(min_length=1, max_length=MOST_ENTRIES)]
    """Each with the repetitions to sample."""
    step: Count
    """The last optimizer step."""
    published: Signed | None
    """The newest version of the weights that was published."""


class NoneLeft(msgspec.Struct, frozen=True, tag=True):
    """There is no more work: no prompt, or no place."""


WorkerInstruction = Joined | Refused | Assigned | NoneLeft
"""Messages of the pipeline to a worker."""

encode_instruction = msgspec.msgpack.Encoder().encode

decode_instruction: Callable[[bytes], WorkerInstruction] = msgspec.msgpack.Decoder(WorkerInstruction).decode


WorkerEndState: TypeAlias = Literal["filtered", "stale", "rejected", "failed", "lost", "unfinished"]
"""The states in which a trajectory may end in a worker: only the process of the trainer knows the trained ones."""


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """Trajectories that a worker dropped."""

    group: GroupId
    repetitions: Annotated[Repetitions, Meta(min_length=1)]
    state: WorkerEndState
    reason: Text


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """A report that a worker sends between its records."""

    observations: Observations | None
    endings: Annotated[tuple[Ending, ...], Meta(max_length=MOST_ENTRIES)]
    """Trajectories that it dropped since the last report."""
    event: WorkerEvent | None = None
    succeeded: Count = 0
    """Rollouts that succeeded since the last report."""
    epoch: Epoch = UNKNOWN
    """From a source's worker: its view of an epoch of its prompts."""
    alone: bool = False
    """True if the event is all that it contains."""

    @classmethod
    def of(cls, event: WorkerEvent) -> WorkerReport:
        """Return a report of `event` alone."""
        return cls(None, (), event, alone=True)
