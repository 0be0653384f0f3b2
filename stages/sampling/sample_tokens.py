"""The tokens of a sequence one by one: which part of the text each is, and its numbers. Knows no file and no view."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..._pipeline.accounting.sample import MOST_TOKENS, SampleBranch, SampleTokens
from ..._schemas import StopReason, TrainBatch
from ..contracts.policies import Tokenizer

T = TypeVar("T")

DIGITS = 4
"""Decimals of a log-probability, and significant digits of an advantage, in a sample."""

INCOMPLETE = "�"
"""The end of a text whose last character has further bytes in the next token."""


def tokens_of_row(batch: TrainBatch, row: int) -> slice:
    """Return the place of a sequence's tokens in its batch."""
    return slice(*batch.cu_seqlens[row : row + 2].tolist())


def sequence_of(
    tokenizer: Tokenizer, batch: TrainBatch, row: int, logprobs: NDArray[np.float32] | None
) -> SampleBranch:
    """Return a sequence with tokens that train as text, with its tokens one by one. Blocks.

    Args:
        tokenizer: decodes the tokens.
        batch: that has the sequence.
        row: its number.
        logprobs: [N] log-probability of each token that trains when training on the batch began; None if unknown.

    Raises:
        Exception: raised by the tokenizer.
    """
    tokens = tokens_of_row(batch, row)
    begin = tokens.start + int(np.argmax(batch.loss_mask[tokens]))
    completion = tokenizer.decode(batch.tokens[begin : tokens.stop].tolist())
    described = slice(begin, min(tokens.stop, begin + MOST_TOKENS))
    characters = characters_of(tokenizer, batch.tokens[described].tolist(), completion)
    return SampleBranch(
        prompt=tokenizer.decode(batch.tokens[tokens.start : begin].tolist()),
        completion=completion,
        tokens=None if characters is None else _described(batch, row, described, characters, logprobs),
        stop_reason=StopReason(int(batch.stop_reasons[row])).name.lower(),
    )


def _described(
    batch: TrainBatch, row: int, place: slice, characters: list[int], logprobs: NDArray[np.float32] | None
) -> SampleTokens:
    trains = batch.loss_mask[place]
    by_token = len(batch.policy_versions) == len(batch.tokens) != len(batch)
    versions = batch.policy_versions[place][trains] if by_token else np.full(trains.sum(), batch.policy_versions[row])
    sampled = None if batch.behavior_logprobs is None else batch.behavior_logprobs[place][trains]
    ratios = None if logprobs is None or sampled is None else logprobs[place][trains] - sampled
    return SampleTokens(
        characters=characters,
        trains=_runs(trains.tolist()),
        advantages=None if batch.advantages is None else _runs(_significant(batch.advantages[place][trains])),
        versions=_runs(versions.tolist()),
        logprobs=None if sampled is None else _decimals(sampled),
        log_ratios=None if ratios is None else _decimals(ratios),
    )


def characters_of(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int] | None:
    """Return the number of characters that each token adds to `text`, which begins with theirs; None if unknown.

    A character of several tokens counts for the last of them.
    """
    known: dict[int, str] = {}
    alone = [known[each] if each in known else known.setdefault(each, tokenizer.decode([each])) for each in ids]
    joined = "".join(alone)
    if text.startswith(joined) and INCOMPLETE not in joined:
        return [len(each) for each in alone]
    pieces = _pieces_in_context(tokenizer, ids)
    return [len(each) for each in pieces] if text.startswith("".join(pieces)) else None


def _pieces_in_context(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds behind those before it; "" while a character is incomplete.

    The two texts that are compared begin at the last complete character but one, for some tokenizers write the
    first token of a text otherwise.
    """
    pieces: list[str] = []
    start = end = 0
    for number in range(1, len(ids) + 1):
        before, now = tokenizer.decode(list(ids[start:end])), tokenizer.decode(list(ids[start:number]))
        if now.endswith(INCOMPLETE) or len(now) <= len(before):
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        start, end = end, number
    return pieces


def _runs(values: Sequence[T]) -> list[tuple[int, T]]:
    """Return successive equal values once, with their number.

    >>> _runs([0, 0, 3])
    [(2, 0), (1, 3)]
    """
    return [(len(list(run)), value) for value, run in groupby(values)]


def _decimals(values: NDArray[np.float32]) -> list[float]:
    found: list[float] = (np.round(values.astype(np.float64), DIGITS) + 0.0).tolist()  # no −0.0
    return found


def _significant(values: NDArray[np.float32]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
