"""The records that stages exchange, beyond those in `penstock` itself."""

from __future__ import annotations

from ._schemas import Array, PackedGroup, Packer, PaddedBatch

__all__ = ["Array", "PackedGroup", "Packer", "PaddedBatch"]
