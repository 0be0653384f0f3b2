"""Messages between a worker and its parent, apart from the records.

The configuration travels on the command line, events on an inherited pipe, reports with the records on their channel.
Only the stage itself is pickled, by the parent for the child that it starts; a child's messages are decoded strictly.
"""

from __future__ import annotations

import msgspec

from ..._schemas import GroupId, TrainBatch, TrajectoryGroup
from ..._schemas.control import Repetition
from ..accounting.shared_counters import EndState
from ..accounting.telemetry import Observations
from ..graph.context import Worker

RECORDS: dict[str, type[TrajectoryGroup | TrainBatch]] = {
    record.schema.kind: record for record in (TrajectoryGroup, TrainBatch)
}
"""The record types that travel between processes, by their names in `WorkerChannels`."""


class WorkerChannels(msgspec.Struct, frozen=True, kw_only=True):
    """The channels of a stage's workers; the same for all of them."""

    outbox_url: str
    outbox_kind: str
    """Key of `RECORDS`."""
    inbox_kind: str
    """Key of `RECORDS`; empty for a source. A worker serves its inbox itself."""
    inbox_capacity: int
    """Records."""
    inbox_capacity_bytes: int
    remote_url: str = ""
    """The URL for workers on other hosts; empty where all run on this one."""
    key: str = ""
    """The key of the run's tcp channels, in hexadecimal digits."""
    host: str = ""
    """`host_identity` of the parent."""


class StageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one start of a worker."""

    name: str
    """`SourceEnv 2/4`."""
    stage: str
    """`SourceEnv`."""
    worker: Worker
    channels: WorkerChannels


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one process, on its command line."""

    of_stage: StageConfig
    parent: int
    """Process id of the parent."""
    payload: int
    """Descriptor of the pickled stage."""
    counters: int
    """Descriptor of the page for the ledger's counters."""
    events: int
    """Descriptor of the pipe to the parent."""


class Starting(msgspec.Struct, frozen=True, tag=True):
    """The worker starts; its stage has not begun."""

    phase: str
    """The phase of its start: `importing train.py`."""


class Connected(msgspec.Struct, frozen=True, tag=True):
    """The worker has connected; its stage begins."""

    transport: str
    """`shm` or `tcp`."""
    pid: int
    node: str
    """The address of its host; empty on the host of the pipeline."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The worker of a middle stage serves its inbox: records may be sent to this URL."""

    url: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The stage returned, and the receiver has all records that it sent."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The stage raised."""

    error: str
    """`raised ValueError: the message`."""
    traceback: str


WorkerEvent = Starting | Connected | Serving | Finished | Failed
"""The events that a worker sends to its parent on the pipe, each as a line of JSON."""


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """Trajectories that the worker of a middle stage dropped."""

    group: GroupId
    repetitions: list[Repetition]
    state: EndState
    reason: str


class WorkerReport(msgspec.Struct, frozen=True, array_like=True):
    """A report that a worker sends between its records."""

    observations: Observations | None
    endings: list[Ending]
    """From a middle stage's worker: trajectories that it dropped since the last report."""
    reasons: dict[str, dict[str, int]]
    """From a source's worker: counts of the trajectories that ended there, by state and reason, since it began."""
    counts: list[int] = []
    """From a source's worker whose counters the parent cannot read: `SharedCounters.counts`."""
    event: WorkerEvent | None = None
    """An event, where no pipe takes it."""


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
