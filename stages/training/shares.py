"""Shares: the groups of a batch that each rank trains, and their encoding.

A share is whole groups, with the totals of the whole batch. Knows neither torch nor processes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..._schemas import TrainBatch


def shares(batch: TrainBatch, count: int) -> tuple[list[TrainBatch], NDArray[np.int64]]:
    """Return the share of `batch` of each of `count` ranks, and [N] the rank that trains each token.

    A share is whole groups in their order, possibly of length 0.
    """
    owners = owners_of(group_tokens(batch), count)[batch.group_of_sequence()]
    return [batch.share(owners == rank) for rank in range(count)], owners.repeat(batch.lengths())


def group_tokens(batch: TrainBatch) -> NDArray[np.int64]:
    """Return [G] the number of tokens of each group."""
    ends = np.cumsum([group.sequences for group in batch.groups])
    tokens: NDArray[np.int64] = np.diff(batch.cu_seqlens[ends], prepend=0)
    return tokens


def owners_of(tokens: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return [G] the rank, of `count`, that trains each group, so that all have a similar number of tokens.

    The largest group goes first, each to the rank that has the fewest tokens: at most a third more than the best
    division, and at most one group more than the mean. Graham, "Bounds on Multiprocessing Timing Anomalies" (1969).

    >>> owners_of(np.array([2, 9, 4, 6]), 2).tolist()
    [0, 0, 1, 1]
    """
    owners = np.zeros(len(tokens), np.int64)
    loads = [(0, rank) for rank in range(count)]
    heapify(loads)
    for group in np.argsort(-tokens, kind="stable").tolist():
        load, rank = heappop(loads)
        owners[group] = rank
        heappush(loads, (load + int(tokens[group]), rank))
    return owners


def encode_share(share: TrainBatch) -> bytes:
    """Encode a share of a batch, for the rank that trains it."""
    columns = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in share.columns().items()}
    return msgspec.msgpack.encode((share.header(), columns))


def decode_share(encoded: bytes) -> TrainBatch:
    """Decode a share of a batch."""
    header, columns = _decode(encoded)
    arrays = {name: np.frombuffer(data, dtype).reshape(shape) for name, (dtype, shape, data) in columns.items()}
    return TrainBatch.assemble(header, arrays)


_decode = msgspec.msgpack.Decoder(tuple[bytes, dict[str, tuple[str, tuple[int, ...], bytes]]]).decode
