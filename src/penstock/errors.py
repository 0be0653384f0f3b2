"""Every error that a caller of penstock may want to catch, one class a situation."""

from __future__ import annotations

from .pipeline.errors import (
    ChannelFull,
    IllegalTransition,
    InvalidConfig,
    InvalidKey,
    InvalidPipeline,
    InvalidRecord,
    LedgerImbalance,
    MissingExtra,
    NobodyListens,
    OutOfSharedMemory,
    PeerClosed,
    PeerLost,
    PenstockError,
    ProtocolMismatch,
    RecordTooLarge,
    StageFailed,
    StaleDescriptor,
    TooManySenders,
    WeightsMismatch,
    WorkerFailed,
)

__all__ = [
    "ChannelFull",
    "IllegalTransition",
    "InvalidConfig",
    "InvalidKey",
    "InvalidPipeline",
    "InvalidRecord",
    "LedgerImbalance",
    "MissingExtra",
    "NobodyListens",
    "OutOfSharedMemory",
    "PeerClosed",
    "PeerLost",
    "PenstockError",
    "ProtocolMismatch",
    "RecordTooLarge",
    "StageFailed",
    "StaleDescriptor",
    "TooManySenders",
    "WeightsMismatch",
    "WorkerFailed",
]
