from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from tests.wire import changes_of, delta_of, largest_delta

Bytes = NDArray[np.uint8]

LONG = 5 * 2**17
"""Bytes of a span with gaps that need several entries: 5 × 65,536 words."""


def applied(delta: bytes, base: Bytes) -> Bytes:
    span = base.copy()
    changes_of(delta, len(base)).apply(span)
    return span


def changed(base: Bytes, words: Any, random: np.random.Generator) -> Bytes:
    """Return `base` with other values in these words."""
    span = base.copy()
    pairs = span[: len(span) // 2 * 2].view("<u2")
    pairs[words] ^= random.integers(1, 2**16, pairs[words].shape, np.uint16)
    return span


@given(st.integers(0, 3000), st.floats(0, 0.39), st.integers(0, 2**32))
def test_a_delta_restores_every_byte(nbytes: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    base = random.integers(0, 256, nbytes, np.uint8)
    words = random.permutation(nbytes // 2)[: int(share * (nbytes // 2))]
    span = changed(base, words, random)
    span[2 * (nbytes // 2) :] += 1

    delta = delta_of(base, span)

    assert delta is not None
    assert len(delta) == 4 * len(words) + nbytes % 2
    assert np.array_equal(applied(delta, base), span)


@given(arrays(np.uint8, st.integers(0, 64)), st.data())
def test_a_delta_exists_unless_more_than_forty_percent_of_the_words_changed(base: Bytes, data: st.DataObject) -> None:
    span = data.draw(arrays(np.uint8, len(base)))
    pairs = len(base) // 2 * 2
    words = int((base[:pairs].view("<u2") != span[:pairs].view("<u2")).sum())

    delta = delta_of(base, span)

    assert (delta is None) == (words > 0.4 * (pairs // 2))
    if delta is not None:
        assert len(delta) <= largest_delta(len(base))
        assert np.array_equal(applied(delta, base), span)


@pytest.mark.parametrize(
    ("words", "entries"),
    [
        ([], 0),
        ([0], 1),
        ([65_535], 1),
        ([65_536], 2),
        ([131_071], 2),
        ([131_072], 3),
        ([5, 5 + 65_536], 2),
        ([5, 6 + 65_536], 3),
        ([327_679], 5),
        ([1, 2, 200_000, 200_001, 327_678], 9),
    ],
)
def test_a_gap_that_one_word_cannot_hold_takes_further_entries(words: list[int], entries: int) -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 256, LONG, np.uint8)
    span = changed(base, words, random)

    delta = delta_of(base, span)

    assert delta is not None
    assert len(delta) == 4 * entries
    assert np.array_equal(applied(delta, base), span)


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.2, 0.399])
def test_a_span_of_many_blocks_is_restored(share: float) -> None:
    random = np.random.default_rng(1)
    base = random.integers(0, 256, 2 * LONG + 1, np.uint8)
    span = changed(base, random.permutation(LONG)[: int(share * LONG)], random)

    delta = delta_of(base, span)

    assert delta is not None
    assert np.array_equal(applied(delta, base), span)


def test_versions_of_every_word_changed_have_no_delta() -> None:
    base = np.zeros(LONG, np.uint8)

    assert delta_of(base, base + 1) is None


def entry(gap: int, value: int = 7) -> bytes:
    return np.array([gap, value], "<u2").tobytes()


@pytest.mark.parametrize(
    ("delta", "nbytes", "reason"),
    [
        (entry(10), 20, "within 10 words, got one at 10"),
        (entry(65_535), 20, "within 10 words, got one at 65535"),
        (np.array([9, 0, 1, 1], "<u2").tobytes(), 20, "within 10 words, got one at 10"),
        (entry(0)[:3], 20, "4 for each entry and 0 more, got 3"),
        (entry(0) + b"\x00", 20, "4 for each entry and 0 more, got 5"),
        (entry(0), 21, "4 for each entry and 1 more, got 4"),
        (b"", 21, "4 for each entry and 1 more, got 0"),
        (entry(0) * 5, 20, "expected at most 16 bytes"),
        (entry(0), 0, "expected at most 0 bytes"),
    ],
)
def test_a_delta_that_does_not_fit_its_span_is_refused(delta: bytes, nbytes: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        changes_of(delta, nbytes)


@given(st.binary(max_size=200), st.integers(0, 120))
def test_any_bytes_are_applied_within_the_span_or_refused(delta: bytes, nbytes: int) -> None:
    memory = np.full(nbytes + 64, 3, np.uint8)

    with suppress(ValueError):
        changes_of(delta, nbytes).apply(memory[32 : 32 + nbytes])

    assert (memory[:32] == 3).all()
    assert (memory[32 + nbytes :] == 3).all()
