"""Messages between a worker and its parent, apart from the records.

The configuration travels on the command line, events on an inherited pipe, reports with the records on their channel.
Only the stage itself is pickled, by the parent for the child that it starts; a child's messages are decoded strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup
from ..._schemas.bounds import MOST_ENTRIES, Count, Line, Name, Signed, SmallCount, Text, Traceback
from ..._schemas.control import Repetitions
from ..accounting.balance import MAX_REASONS
from ..accounting.epoch import UNKNOWN, Epoch
from ..accounting.shared_counters import COUNTS
from ..accounting.telemetry import Observations
from ..graph.context import Worker

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
    """True if the workers of a source are told which prompts to sample."""
    per_step: Count = 0
    """Trajectories that an optimizer step trains, of all workers together; 0 if that is unknown before the first."""

    @property
    def held_by_parent(self) -> bool:
        """Return whether the trajectories of a worker are in the ledger of the parent, and not in its own."""
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
    """The configuration of one process, on its command line."""

    of_stage: StageConfig
    parent: SmallCount
    """Process id of the parent."""
    payload: SmallCount
    """Descriptor of the pickled stage."""
    counters: SmallCount
    """Descriptor of the page for the ledger's counters."""
    events: SmallCount
    """Descriptor of the pipe to the parent."""
    watched: SmallCount
    """Descriptor of the file for the watch on its event loop."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """The worker starts; its stage has not begun."""

    phase: Text
    """The phase of its start: `importing train.py`."""


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The worker has connected; its stage begins."""

    transport: Name
    """`shm` or `tcp`."""
    pid: SmallCount
    node: Name
    """The address of its host; empty on the host of the pipeline."""
    numa: Text = ""
    """`node 1`, to which it is bound there, or the reason for which it is not."""


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
    """A worker that was started elsewhere has connected, and asks for its place."""

    digest: Name
    """The digest of the configuration or script from which it makes the stage."""


class Wants(msgspec.Struct, frozen=True, tag=True):
    """The worker has room for another prompt."""


class Leaves(msgspec.Struct, frozen=True, tag=True):
    """The worker completes what it has begun, and takes nothing more."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """The worker ends before its stage is done, for the reason."""

    reason: Text


class Dies(msgspec.Struct, frozen=True, tag=True):
    """The worker ends its process, for the reason."""

    reason: Text
    """`did not run its event loop for 310 s, it was at …`."""


WorkerEvent = Starting | Connected | Serving | Finished | Failed | Joins | Wants | Leaves | Left | Dies
"""The events that a worker sends to its parent: on a pipe, each as a line of JSON, or with its records."""


class KeylessAddress(msgspec.Struct, frozen=True):
    """A `WeightAddress` without its key, which a worker has already."""

    url: Line
    local: Line
    host: Name
    generation: Count


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
    """The worker samples this prompt."""

    number: Count
    published: Signed | None
    """The newest version of the weights that was published."""


class NoneLeft(msgspec.Struct, frozen=True, tag=True):
    """There is no more work: no prompt, or no place."""


WorkerInstruction = Joined | Refused | Assigned | NoneLeft
"""Messages of the pipeline to a worker that was started elsewhere."""

encode_instruction = msgspec.msgpack.Encoder().encode

decode_instruction: Callable[[bytes], WorkerInstruction] = msgspec.msgpack.Decoder(WorkerInstruction).decode


WorkerEndState: TypeAlias = Literal["filtered", "stale", "rejected", "failed", "lost", "unfinished"]
"""The states in which a trajectory may end in a worker: only the process of the trainer knows what was trained."""

WORKER_END_STATES: tuple[WorkerEndState, ...] = get_args(WorkerEndState)

Reasons: TypeAlias = Annotated[dict[Text, Count], Meta(max_length=MAX_REASONS + 1)]
"""The reasons of ends in one state, with their counts; `OTHER_REASONS` may be one more."""


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """Trajectories that the worker of a middle stage dropped."""

    group: GroupId
    repetitions: Annotated[Repetitions, Meta(min_length=1)]
    state: WorkerEndState
    reason: Text


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """A report that a worker sends between its records."""

    observations: Observations | None
    endings: Annotated[tuple[Ending, ...], Meta(max_length=MOST_ENTRIES)]
    """From a middle stage's worker: trajectories that it dropped since the last report."""
    reasons: Annotated[dict[WorkerEndState, Reasons], Meta(max_length=len(WORKER_END_STATES))]
    """From a source's worker: counts of the trajectories that ended there, by state and reason, since it began."""
    counts: Annotated[list[Count], Meta(max_length=COUNTS)] = []
    """From a source's worker whose counters the parent cannot read: `SharedCounters.counts`."""
    event: WorkerEvent | None = None
    """An event, where no pipe takes it."""
    epoch: Epoch = UNKNOWN
    """From a source's worker: what it knows of an epoch of its prompts."""
    alone: bool = False
    """True if the event is all that it contains."""

    @classmethod
    def of(cls, event: WorkerEvent) -> WorkerReport:
        """Return a report of `event` alone."""
        return cls(None, (), {}, event=event, alone=True)


_decode_lines = msgspec.json.Decoder(WorkerEvent).decode_lines


def encode_event(event: WorkerEvent) -> bytes:
    """Return `event` as the bytes for the pipe."""
    return msgspec.json.encode(event) + b"\n"


def decode_events(buffer: bytearray) -> list[WorkerEvent]:
    """Remove every complete event from the beginning of `buffer`, and return them.

    Raises:
        msgspec.DecodeError: the bytes are no event.
    """
    end = buffer.rfind(b"\n") + 1
    lines = bytes(buffer[:end])
    del buffer[:end]
    return _decode_lines(lines)
