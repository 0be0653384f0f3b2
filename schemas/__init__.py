"""Records, messages and configuration, with the rules that they are checked against. Knows no channel and no stage."""

from .batch import PackedGroup, Packer, PaddedBatch, TrainBatch
from .columns import Array
from .errors import InvalidConfig, InvalidRecord, PenstockError, ProtocolMismatch
from .group import Trajectory, TrajectoryGroup
from .ids import GroupId, StopReason, TrajectoryId
from .tokenizer import TokenizerIdentity, check_tokenizers, tokenizer_identity

__all__ = [
    "Array",
    "GroupId",
    "InvalidConfig",
    "InvalidRecord",
    "PackedGroup",
    "Packer",
    "PaddedBatch",
    "PenstockError",
    "ProtocolMismatch",
    "StopReason",
    "TokenizerIdentity",
    "TrainBatch",
    "Trajectory",
    "TrajectoryGroup",
    "TrajectoryId",
    "check_tokenizers",
    "tokenizer_identity",
]
