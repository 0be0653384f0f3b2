"""Micro-batches: the sequences of a batch laid out in rows for a model, several in a row where they fit.

A row is as wide as the longest sequence of its micro-batch. Shorter ones share rows, each with its own positions and
attending to itself alone, so that little is computed for padding. Long sequences come first, beside others of similar
length, and each is put into the fullest row with room for it; rows wider than `PACKED_WIDTH` have one sequence each,
and so have all rows of a model with states, which pass along a row: padding behind a sequence changes nothing in it.

The alignment of logits and tokens is computed here: token t of a sequence is predicted at t − 1, and the first token
has no prediction. Columns keep only the tokens that train.

Axes: R rows, W tokens of a row, S sequences, T tokens that train, in the order of their sequences.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._schemas import Array, InvalidRecord, TrainBatch
from ..._schemas.columns import count_between

PACKED_WIDTH = 4096
"""Tokens of the widest row of several sequences: its dense mask takes 16 MB. A row of one sequence needs no mask."""

Rows: TypeAlias = list[list[int]]
"""The sequences in each row."""


class Packed(NamedTuple):
    """Sequences one behind the other, without the other columns of a TrainBatch."""

    tokens: NDArray[np.int32]
    """[N] the tokens."""
    cu_seqlens: NDArray[np.int64]
    """[S + 1] the start of each sequence; the last entry is N."""
    loss_mask: NDArray[np.bool_]
    """[N] true on the tokens that train, or are requested."""

    @classmethod
    def of(
        cls, tokens: Sequence[NDArray[np.int32]], wanted: Sequence[NDArray[np.bool_]], lengths: NDArray[np.int64]
    ) -> Self:
        """Return sequences of `lengths` [S] from pieces of tokens and of the mask of requested tokens."""
        return cls(np.concatenate(tokens), np.append(0, lengths.cumsum()), np.concatenate(wanted))


Sequences: TypeAlias = TrainBatch | Packed


class MicroBatch(NamedTuple):
    """Some sequences of a batch, as tensors."""

    tokens: Tensor
    """[R, W] int64; padding repeats the first of the row: a padding token of the model may have no gradient."""
    positions: Tensor
    """[R, W] int64, position of each token within its sequence; they continue over the padding behind it."""
    sequences: Tensor
    """[R, W] int64, the sequence of each token; −1 on padding."""
    cu_seqlens: Tensor
    """[K + 1] int32, the start in R · W of each sequence, and of the tokens behind them in a row; the last is R · W."""
    predicted_at: Tensor
    """[T] int64, index in R · W of the logits that predict each token that trains."""
    targets: Tensor
    """[T] int64, the tokens that train."""
    lengths: Tensor
    """[S] int64, number of tokens of each sequence that train."""
    columns: dict[str, Tensor]
    """[T] or [T, K] each: the columns of the tokens that train, by name."""


def micro_batches(
    sequences: Sequences,
    columns: Mapping[str, Array],
    max_tokens: int | None,
    device: torch.device,
    *,
    packs: bool = True,
) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` tokens, padding included, of the sequences with tokens that train.

    See `lay_out`. Other sequences are left out, because their results would not be used.

    Args:
        sequences: the sequences.
        columns: columns over its tokens, [N] or [N, K] each.
        max_tokens: bound on rows times width of a micro-batch; None for a single micro-batch.
        device: device of the tensors.
        packs: whether a row may have several sequences.

    Raises:
        InvalidRecord: the loss mask is true on the first token of a sequence.
    """
    lengths = np.diff(sequences.cu_seqlens)
    if sequences.loss_mask[sequences.cu_seqlens[:-1][lengths > 0]].any():
        raise InvalidRecord("loss_mask: expected false on the first token of every sequence, which has no prediction")
    trained = count_between(sequences.loss_mask, sequences.cu_seqlens)
    laid = lay_out(np.where(trained, lengths, 0).tolist(), max_tokens, PACKED_WIDTH if packs else 0)
    return [_laid_out(sequences, columns, rows, lengths, device) for rows in laid]


def empty_micro_batch(sequences: Sequences, device: torch.device) -> MicroBatch:
    """Return a micro-batch of one token that does not train, of `sequences` if they have any."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    one = torch.full_like(zero, int(sequences.tokens[0]) if len(sequences.tokens) else 1)
    starts = torch.arange(2, dtype=torch.int32, device=device)
    return MicroBatch(one, zero, zero, starts, predicted_at=none, targets=none, lengths=none, columns={})


def lay_out(lengths: list[int], max_tokens: int | None, packed_width: int = PACKED_WIDTH) -> list[Rows]:
    """Assign sequences of these lengths to micro-batches of rows; leave out empty ones.

    Rows times width is at most `max_tokens`, unless the longest sequence is longer: then there is one row of its
    width. None for one micro-batch of any number of rows. Rows wider than `packed_width` have one sequence each.

    >>> lay_out([3, 8, 5, 2], max_tokens=None)
    [[[1], [2, 0], [3]]]
    >>> lay_out([3, 8, 5, 2], max_tokens=None, packed_width=0)
    [[[1], [2], [0], [3]]]
    """
    waiting: dict[int, list[int]] = {}
    for sequence in reversed(range(len(lengths))):
        waiting.setdefault(lengths[sequence], []).append(sequence)
    waiting.pop(0, None)
    left = sorted(waiting)
    laid: list[Rows] = []
    while left:
        laid.append(_filled(waiting, left, max_tokens, packed_width))
    return laid


def _filled(waiting: Mapping[int, list[int]], left: list[int], max_tokens: int | None, packed_width: int) -> Rows:
    """Return a micro-batch of the longest sequences that wait and of those that fit beside them; they wait no more.

    Args:
        waiting: the sequences of each length, the next at the end.
        left: the lengths that still wait, ascending.
        max_tokens: see `lay_out`.
        packed_width: see `lay_out`.
    """
    width = left[-1]
    most = math.inf if max_tokens is None else max(1, max_tokens // width)
    rows: Rows = []
    rooms: list[tuple[int, int]] = []  # free tokens and number of each row; the fullest comes first
    while left:
        # 1. The longest begins a row, or fits into one. 2. Once there is no other row: the longest that fits into one.
        longest = left[-1] if len(rows) < most else rooms[-1][0] if rooms else 0
        if (place := bisect_right(left, longest) - 1) < 0:
            break
        length = left[place]
        sequence = waiting[length].pop()
        if not waiting[length]:
            del left[place]
        if (fitting := bisect_left(rooms, (length, 0))) < len(rooms):
            room, row = rooms.pop(fitting)
            rows[row].append(sequence)
            insort(rooms, (room - length, row))
        else:
            if width <= packed_width:
                insort(rooms, (width - length, len(rows)))
            rows.append([sequence])
    return rows


def _laid_out(
    sequences: Sequences,
    columns: Mapping[str, Array],
    rows: Rows,
    lengths: NDArray[np.int64],
    device: torch.device,
) -> MicroBatch:
    order = np.array(list(chain.from_iterable(rows)))
    width = int(lengths[order[0]])
    many = lengths[order]
    starts = _starts(rows, lengths.tolist(), width)
    within = _ranges(many)
    taken = np.repeat(sequences.cu_seqlens[order], many) + within
    at = np.repeat(starts, many) + within
    everywhere = np.arange(len(rows) * width)
    positions = everywhere - starts[np.searchsorted(starts, everywhere, "right") - 1]
    owner = np.repeat(np.arange(len(order)), many)
    trains = sequences.loss_mask[taken]

    def rectangle(values: Array, fill: int) -> Tensor:
        flat = np.full(len(rows) * width, fill, np.int64)
        flat[at] = values
        return torch.from_numpy(flat).view(len(rows), width).to(device)

    tokens, owners = rectangle(sequences.tokens[taken], 0), rectangle(owner, -1)

    def column(values: Array) -> Tensor:
        return torch.from_numpy(values[taken[trains]]).to(device)

    return MicroBatch(
        tokens=torch.where(owners < 0, tokens[:, :1], tokens),
        positions=torch.from_numpy(positions).view(len(rows), width).to(device),
        sequences=owners,
        cu_seqlens=torch.from_numpy(
            np.unique(np.concatenate([starts, starts + many, [len(everywhere)]])).astype(np.int32)
        ).to(device),
        predicted_at=torch.from_numpy(at[trains] - 1).to(device),
        targets=column(sequences.tokens).long(),
        lengths=torch.from_numpy(np.bincount(owner[trains], minlength=len(order))).to(device),
        columns={name: column(values) for name, values in columns.items()},
    )


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 to n − 1 for each n of `counts`, one behind the other."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def _starts(rows: Iterable[list[int]], lengths: list[int], width: int) -> NDArray[np.int64]:
    """Return the start of each sequence, in the order of the rows, one behind the other."""
    starts: list[int] = []
    for number, row in enumerate(rows):
        start = number * width
        for sequence in row:
            starts.append(start)
            start += lengths[sequence]
    return np.array(starts)
