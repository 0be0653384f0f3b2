"""Build and read messages as they travel, for tests in which a peer does not keep to the protocol."""

from __future__ import annotations

import struct
from typing import Any

from penstock._pipeline.accounting.evaluations import EvaluationPart
from penstock._pipeline.accounting.telemetry import Observations
from penstock._pipeline.weights.span_delta import changes_of, delta_of, largest_delta
from penstock._pipeline.workers.worker_messages import (
    Connected,
    Dies,
    Ending,
    Failed,
    Finished,
    Joined,
    Joins,
    Leaves,
    Left,
    Refused,
    Serving,
    Wants,
    WorkerEvent,
    WorkerReport,
)
from penstock._schemas import control
from penstock._schemas.control import (
    ChunkRequest,
    CreditRequest,
    DeltaRequest,
    EndOfWeights,
    Message,
    NewVersion,
    NoDelta,
    PauseAck,
    Ready,
    Reject,
    SpanDelta,
    Subscribe,
    WeightLayout,
)
from penstock._schemas.descriptor import Descriptor

__all__ = [
    "PROTOCOL_VERSION",
    "ChunkRequest",
    "Connected",
    "CreditRequest",
    "DeltaRequest",
    "Dies",
    "EndOfWeights",
    "Ending",
    "EvaluationPart",
    "Failed",
    "Finished",
    "Joined",
    "Joins",
    "Leaves",
    "Left",
    "Message",
    "NewVersion",
    "NoDelta",
    "Observations",
    "PauseAck",
    "Ready",
    "Refused",
    "Reject",
    "Serving",
    "SpanDelta",
    "Subscribe",
    "Wants",
    "WeightLayout",
    "WorkerEvent",
    "WorkerReport",
    "changes_of",
    "close",
    "connect_message",
    "credit_grant",
    "decode",
    "delta_of",
    "encode",
    "frame",
    "largest_delta",
    "publish",
    "ready",
    "segment_offer",
]

PROTOCOL_VERSION = control.PROTOCOL_VERSION


def connect_message(**changes: Any) -> control.Connect:
    """Return the message with which a sender begins, over shared memory unless `changes` name another transport."""
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "transport": "shm",
        "kind": "group",
        "identity": b"p" + bytes(15),
        "name": "stranger",
        "pid": 1,
    }
    return control.Connect(**(fields | changes))


def segment_offer(slots: int, slot_bytes: int, nbytes: int) -> control.SegmentOffer:
    """Return the offer of a segment."""
    return control.SegmentOffer(slots, slot_bytes, nbytes)


def ready() -> control.Ready:
    """Return the message that ends a handshake."""
    return control.Ready()


def publish(*descriptors: tuple[int, int, int, int, int, int]) -> control.Publish:
    """Return the message that bundles were sent, each as (sequence, records, slot, slots, generation, nbytes)."""
    return control.Publish(tuple(Descriptor(*fields) for fields in descriptors))


def close(sequence: int) -> control.Close:
    """Return the message with which a sender ends, with the sequence number of its last record."""
    return control.Close(sequence)


def credit_grant(*released: tuple[int, int, int]) -> control.CreditGrant:
    """Return the message that a receiver released spans, each as (slot, generation, records)."""
    return control.CreditGrant(released)


def encode(message: control.Message) -> bytes:
    """Return a message as it travels over ZeroMQ."""
    return control.encode(message)


def frame(message: control.Message) -> bytes:
    """Return a message as it travels over a control connection: its length, and its bytes."""
    body = encode(message)
    return struct.pack("<I", len(body)) + body


def decode(body: bytes) -> tuple[str, Any]:
    """Return the type of a message by name, and the message."""
    message = control.decode(body)
    return type(message).__name__, message
