"""Micro-batches in the form of prime-rl: sequences packed end to end, the same number of micro-batches for each rank.

Read off prime-rl's src/prime_rl/transports/rollouts/types.py and src/prime_rl/trainer/batch.py at COMMIT. Its trainer
divides the loss by the tokens that train on all ranks, and adds up the results of the ranks: the sum does not depend on
the packing. Knows no transport.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...._schemas import InvalidRecord, TrainBatch
from ...models.scoring import own_temperatures

COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"
"""The commit of prime-rl that has these types."""


class PrimeRLMicroBatch(msgspec.Struct, array_like=True, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Rows that one rank computes at once; the order of the fields is that of the message."""

    input_ids: list[int]
    """[N] tokens of all sequences."""
    loss_mask: list[bool]
    """[N] true on the tokens that train."""
    advantages: list[float]
    """[N]."""
    inference_logprobs: list[float]
    """[N] log-probability under the policy that sampled the token; 0 where it does not train."""
    position_ids: list[int]
    """[N] position of each token within its sequence."""
    sequence_lengths: list[int]
    """[S]."""
    temperatures: list[float]
    """[N]."""
    env_names: list[str]
    """[N]."""
    seq_lens: list[int]
    """[S] the same as `sequence_lengths`: they differ where one sequence has several parts."""
    ref_logprobs: list[float] | None = None
    """[N]."""


def pack_for_ranks(batch: TrainBatch, ranks: int, max_tokens: int, temperature: float) -> list[list[PrimeRLMicroBatch]]:
    """Return the micro-batches of each rank, all lists equally long.

    If there are fewer sequences than ranks, some ranks get a copy that does not train.

    Args:
        batch: a batch with advantages and behavior_logprobs. Sequences without a token that trains are left out.
        ranks: the number of data-parallel ranks.
        max_tokens: tokens of a micro-batch.
        temperature: that of the sampling, for groups without their own in `meta["temperatures"]`.

    Raises:
        InvalidRecord: a column is missing, a sequence is longer than `max_tokens`, or no token trains.
    """
    columns = _columns(batch, temperature)
    lengths = batch.lengths()
    trains = np.flatnonzero(batch.completion_lengths())
    if not len(trains):
        raise InvalidRecord("expected a batch in which a token trains, got none: prime-rl would wait for another")
    if (longest := int(lengths[trains].max())) > max_tokens:
        raise InvalidRecord(
            f"expected sequences of at most {max_tokens} tokens, prime-rl's model.seq_len, got {longest}: set a bound "
            "on prompts and completions, for prime-rl would cut off the end"
        )
    packed = _split_evenly(_packed(trains, lengths, max_tokens), ranks)
    micro_batches = [_micro_batch(batch, columns, rows) for rows in packed]
    unused = msgspec.structs.replace(micro_batches[-1], loss_mask=[False] * len(micro_batches[-1].input_ids))
    micro_batches += [unused] * (-len(micro_batches) % ranks)
    return [micro_batches[rank::ranks] for rank in range(ranks)]


def _columns(batch: TrainBatch, temperature: float) -> dict[str, NDArray[Any]]:
    """Return [N] each field with an entry for every token but the names of environments."""
    advantages, logprobs = batch.advantages, batch.behavior_logprobs
    if advantages is None or logprobs is None:
        raise InvalidRecord(
            f"expected a batch with advantages and behavior_logprobs, which prime-rl's loss needs, got "
            f"{', '.join(batch.columns())}"
        )
    ids = np.split(batch.rollout_ids, np.cumsum([group.sequences for group in batch.groups])[:-1])
    own = own_temperatures(batch.groups, ids, batch.lengths(), temperature)
    columns: dict[str, Any] = {
        "input_ids": batch.tokens,
        "loss_mask": batch.loss_mask,
        "advantages": np.where(batch.loss_mask, advantages, 0),
        "inference_logprobs": np.where(batch.loss_mask, logprobs, 0),
        "position_ids": batch.position_ids,
        "temperatures": np.full(len(batch.tokens), temperature) if own is None else own,
    }
    return columns if batch.ref_logprobs is None else columns | {"ref_logprobs": batch.ref_logprobs}


def _packed(sequences: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int) -> list[list[int]]:
    """Return sequences in packs of at most `max_tokens`, longest first, each in the first pack with room for it."""
    packs: list[list[int]] = []
    room: list[int] = []
    for sequence in sequences[np.argsort(-lengths[sequences], kind="stable")].tolist():
        length = int(lengths[sequence])
        place = next((place for place, free in enumerate(room) if free >= length), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(max_tokens)
        packs[place].append(sequence)
        room[place] -= length
    return packs


def _split_evenly(packs: list[list[int]], ranks: int) -> list[list[int]]:
    """Return a multiple of `ranks` packs, as far as there are sequences: halves of the fullest ones."""
    packs = list(packs)
    while len(packs) % ranks and max(map(len, packs)) > 1:
        fullest = max(range(len(packs)), key=lambda place: len(packs[place]))
        whole = packs.pop(fullest)
        packs += [whole[::2], whole[1::2]]
    return packs


def _micro_batch(batch: TrainBatch, columns: dict[str, NDArray[Any]], rows: list[int]) -> PrimeRLMicroBatch:
    lengths = batch.lengths()[rows].tolist()
    tokens = np.concatenate([np.arange(batch.cu_seqlens[row], batch.cu_seqlens[row + 1]) for row in rows])
    groups = batch.group_of_sequence()[rows].tolist()
    names = [batch.groups[group].env for group, length in zip(groups, lengths, strict=True) for _ in range(length)]
    taken: dict[str, Any] = {name: column[tokens].tolist() for name, column in columns.items()}
    return PrimeRLMicroBatch(env_names=names, sequence_lengths=lengths, seq_lens=lengths, **taken)
