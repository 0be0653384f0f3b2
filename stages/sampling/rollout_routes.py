"""The column `routed_experts` of finished rollouts, from the records of their turns.

A record covers the prompt of its turn too, and so all turns before it. Each token has the record of the first turn that
read it: a sampled token that of the turn that sampled it, except for the last, which the next turn reads with the
tokens of the environment. Other tokens have zeros, as in verl: no record, since the experts of a token differ.

Axes: T tokens of a sequence, N of all, L layers with experts, E experts that each chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..._schemas import InvalidRecord
from ..contracts.policies import Completion
from ..contracts.rollouts import Branch, tokens_of

Experts: TypeAlias = NDArray[Any]
"""Of uint8 or uint16."""


def routed_experts(sequences: Sequence[Branch]) -> Experts | None:
    """Return [N, L, E] the experts of all tokens; None if a turn of the policy has no record.

    Raises:
        InvalidRecord: the records are of models of several shapes.
    """
    turns = [turn for sequence in sequences for turn in sequence.turns if isinstance(turn, Completion)]
    records = [turn.routed_experts for turn in turns if turn.routed_experts is not None]
    if not records or len(records) < len(turns):
        return None
    forms = {(record.shape[1:], record.dtype) for record in records}
    if len(forms) > 1:
        raise InvalidRecord(f"routed_experts: expected turns of one model, got records of {sorted(map(str, forms))}")
    return np.concatenate([_of_sequence(sequence, records[0]) for sequence in sequences])


def _of_sequence(sequence: Branch, like: Experts) -> Experts:
    """Return [T, L, E] the experts of a sequence."""
    lengths = [len(tokens_of(turn)) for turn in sequence.turns]
    experts = np.zeros((sum(lengths), *like.shape[1:]), like.dtype)
    end = known = 0
    for turn, length in zip(sequence.turns, lengths, strict=True):
        end += length
        if not isinstance(turn, Completion) or turn.routed_experts is None:
            continue
        # The record ends where the turn does. It may begin later than the sequence, or be that of a longer prompt, if
        # an agent's history was cut: then it still covers the turn.
        last = end - 1
        own = turn.routed_experts[:-1][-(last - known) :] if last > known else like[:0]
        experts[last - len(own) : last] = own
        known = max(known, last)
    return experts
