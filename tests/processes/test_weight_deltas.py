"""Deltas of weights to hosts that have the version before: over real sockets, and through a relay that alters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from tests.processes.weight_relay import Relay, relay
from tests.wire import SpanDelta

from penstock.errors import PeerLost
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

LOOPBACK = "tcp://127.0.0.1:0"

CHUNK_BYTES, SPAN_CHUNKS = 256, 8

SPANS = 20

Weights = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._pipeline.weights.weight_transfer.CHUNK_BYTES", CHUNK_BYTES)


def tensors() -> Weights:
    """Return tensors of 19 spans and one byte."""
    words = (SPANS - 1) * SPAN_CHUNKS * CHUNK_BYTES // 2
    return {"words": np.arange(words).astype(np.int16), "byte": np.ones(1, np.uint8)}


def changed(weights: Weights, *, every: int, add: int = 1) -> Weights:
    """Return the tensors with every so manieth word changed, and the byte."""
    copied = {name: tensor.copy() for name, tensor in weights.items()}
    copied["words"][::every] += add
    copied["byte"] += add
    return copied


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[WeightPublisher, Relay, WeightSubscriber, Weights]]:
    """Yield a publisher of version 1, a relay, and a subscriber of another host that has it in its tensors."""
    model = changed(tensors(), every=1)
    async with (
        WeightPublisher(tensors()) as publisher,
        publisher.serve(LOOPBACK) as address,
        relay(address) as between,
        WeightSubscriber(between.address) as subscriber,
    ):
        subscriber.attach(model)
        await publisher.publish(tensors(), version=1)
        assert await refreshed(subscriber, 1)
        between.requested.clear()
        yield publisher, between, subscriber, model


async def refreshed(subscriber: WeightSubscriber, version: int) -> bool:
    await subscriber.newer(version - 1)
    return await anyio.to_thread.run_sync(subscriber.refresh) == version


def are_equal(some: Weights, others: Weights) -> bool:
    return all(np.array_equal(some[name], others[name]) for name in others)


def far(address: WeightAddress) -> WeightAddress:
    return replace(address, host="a third")


async def test_a_host_that_has_a_version_receives_the_changes_of_the_next_alone() -> None:
    weights = tensors()

    async with relayed() as (publisher, between, subscriber, model):
        sent = len(between.chunks)
        for version in range(2, 6):
            weights = changed(weights, every=50)
            await publisher.publish(weights, version)
            assert await refreshed(subscriber, version)
            assert are_equal(model, weights)

    deltas = between.chunks[sent:]
    assert not between.requested
    assert sorted(between.deltas_requested) == [(v, v - 1, i) for v in range(2, 6) for i in range(SPANS)]
    assert sum(len(each.content) for each in deltas) < 0.05 * 4 * sum(each.nbytes for each in weights.values())


async def test_a_version_of_which_more_than_forty_percent_changed_is_sent_whole() -> None:
    weights = changed(tensors(), every=2)

    async with relayed() as (publisher, between, subscriber, model):
        await publisher.publish(weights, version=2)
        assert await refreshed(subscriber, 2)

    chunks = -(-sum(each.nbytes for each in weights.values()) // CHUNK_BYTES)
    assert {index for _, index in between.requested} == set(range(chunks - 1))  # the last span is one byte
    assert are_equal(model, weights)


async def test_only_spans_with_large_changes_are_sent_whole() -> None:
    weights = changed(tensors(), every=50)
    weights["words"][: SPAN_CHUNKS * CHUNK_BYTES // 2] += 7

    async with relayed() as (publisher, between, subscriber, model):
        await publisher.publish(weights, version=2)
        assert await refreshed(subscriber, 2)

    assert sorted(between.requested) == [(2, index) for index in range(SPAN_CHUNKS)]
    assert are_equal(model, weights)


async def test_a_slow_host_receives_deltas_after_their_base_was_overwritten() -> None:
    versions = {2: changed(tensors(), every=50)}
    versions[3] = changed(versions[2], every=60)

    async with relayed() as (publisher, between, slow, model), WeightSubscriber(far(between.upstream)) as fast:
        await fast.newer()
        between.flowing = anyio.Event()
        for version, weights in versions.items():
            await publisher.publish(weights, version)
            await fast.newer(version - 1)
        between.flowing.set()
        assert await refreshed(slow, 3)

    assert not between.requested
    assert sorted({(version, base) for version, base, _ in between.deltas_requested}) == [(2, 1), (3, 2)]
    assert are_equal(model, versions[3])


async def test_a_host_whose_version_was_overwritten_receives_the_newest_whole() -> None:
    weights = tensors()

    async with relayed() as (publisher, between, slow, model):
        between.flowing = anyio.Event()
        for version in range(2, 6):
            weights = changed(weights, every=50)
            await publisher.publish(weights, version)
        between.flowing.set()
        assert await refreshed(slow, 5)

    assert {version for version, _ in between.requested} & {4, 5}  # the newest that it was told of when it went on
    assert are_equal(model, weights)


def emptied(delta: SpanDelta) -> SpanDelta:
    return msgspec.structs.replace(delta, content=b"")


def mistaken(delta: SpanDelta) -> SpanDelta:
    return msgspec.structs.replace(delta, content=delta.content[:-1] + bytes([delta.content[-1] ^ 1]))


def out_of_range(delta: SpanDelta) -> SpanDelta:
    return msgspec.structs.replace(delta, content=b"\xff" * (len(delta.content) // 4 * 4))


def of_another_base(delta: SpanDelta) -> SpanDelta:
    return msgspec.structs.replace(delta, xxh3=bytes(16))


ALTERATIONS = [emptied, mistaken, out_of_range, of_another_base]


@pytest.mark.parametrize("alter", ALTERATIONS)
async def test_a_span_whose_delta_does_not_give_its_hash_is_requested_whole(alter: Any) -> None:
    weights = tensors()

    async with relayed() as (publisher, between, subscriber, model):
        between.alter = lambda message: (
            alter(message) if isinstance(message, SpanDelta) and message.index == 5 else message
        )
        for version in (2, 3, 4):
            weights = changed(weights, every=50)
            await publisher.publish(weights, version)
            assert await refreshed(subscriber, version)
            assert are_equal(model, weights)

    of_span = range(5 * SPAN_CHUNKS, 6 * SPAN_CHUNKS)
    assert sorted(between.requested) == [(version, index) for version in (2, 3, 4) for index in of_span]


@pytest.mark.parametrize("alter", ALTERATIONS)
async def test_deltas_that_are_always_damaged_end_the_subscription(alter: Any) -> None:
    async with relayed() as (publisher, between, subscriber, _):
        between.alter = lambda message: alter(message) if isinstance(message, SpanDelta) else message
        await publisher.publish(changed(tensors(), every=50), version=2)

        with pytest.raises(PeerLost, match="expected chunks with their hashes, got 9 damaged ones of version 2"):
            await subscriber.newer(than=1)


async def test_a_transfer_of_deltas_continues_after_a_cut_where_it_stopped() -> None:
    weights = changed(tensors(), every=50)

    async with relayed() as (publisher, between, subscriber, model):

        def cut() -> None:
            if len(between.deltas_requested) == SPANS:
                between.cut()

        between.on_request = cut
        await publisher.publish(weights, version=2)
        assert await refreshed(subscriber, 2)

    again = between.deltas_requested[SPANS:]
    assert 0 < len(again) < SPANS
    assert not between.requested
    assert are_equal(model, weights)
