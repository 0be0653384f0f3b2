"""A relay flips one bit of a connection to published weights: the weights arrive as they are, or an error says why not.

The mirror of the other host connects again where a connection ends, so both ends have to be told that it did.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import numpy as np
import pytest
from chaos.relay import relayed
from tests.failsafe import FAILSAFE_S
from tests.networks.test_flipped_bits import HEARTBEAT_S, CommandFlag, Flip, every

from penstock.errors import NobodyListens, PenstockError, ProtocolMismatch
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

AT_ONCE = 16
"""Connections at a time."""

PUBLISHED = {"weight": np.arange(2**13, dtype=np.float32)}
"""32 KB: one chunk, in which the flips of any byte lie."""


def zeros() -> dict[str, Any]:
    return {"weight": np.zeros_like(PUBLISHED["weight"])}


async def mirror(address: WeightAddress, name: str, flip: Flip) -> float:
    """Receive the weights through a relay, as a host of its own; return the seconds from the flip on.

    Raises:
        AssertionError: other weights arrived.
    """
    failure: Exception | None = None
    weights = zeros()
    async with relayed(int(address.url.rpartition(":")[2]), lambda: flip) as port:
        far = replace(address, url=f"tcp://127.0.0.1:{port}", host=name)
        with anyio.fail_after(FAILSAFE_S):
            try:
                async with WeightSubscriber(far) as subscriber:
                    await subscriber.newer()
                    subscriber.attach(weights)
                    subscriber.refresh()
            except PenstockError as error:
                failure = error
    assert failure is not None or np.array_equal(weights["weight"], PUBLISHED["weight"])
    return time.monotonic() - (flip.flipped_s or time.monotonic())


async def mirror_through(flips: Sequence[Flip], *, trusted_link: bool = False) -> float:
    """Subscribe once for each flip, `AT_ONCE` at a time; then no subscriber is left. Return the longest time of one."""
    pending, took_s = iter(flips), list[float]()
    async with (
        WeightPublisher(PUBLISHED) as publisher,
        publisher.serve("tcp://127.0.0.1:0", heartbeat_timeout_s=HEARTBEAT_S, trusted_link=trusted_link) as address,
    ):
        await publisher.publish(PUBLISHED, 1)

        async def take_turns(lane: int) -> None:
            for number, flip in enumerate(pending):
                took_s.append(await mirror(address, f"host {lane}-{number}", flip))

        async with anyio.create_task_group() as lanes:
            for lane in range(AT_ONCE):
                lanes.start_soon(take_turns, lane)
        with anyio.fail_after(FAILSAFE_S):
            while publisher.subscribers:  # noqa: ASYNC110 (each goes by itself)
                await anyio.sleep(0.01)
    return max(took_s)


async def test_one_flipped_bit_changes_no_weights() -> None:
    random = Random(0)  # noqa: S311 (no secret)
    headers = every("header", [0, 1, 4, 6, 9, 13], random)
    flips = [*headers, *every("handshake", range(0, 300, 60), random), *every("byte", [9000], random)]

    await mirror_through(flips)

    assert sum(flip.flipped_s is not None for flip in flips) > 16


async def test_one_flipped_bit_of_a_link_that_is_not_encrypted_changes_no_weights() -> None:
    random = Random(0)  # noqa: S311 (no secret)
    flips = [
        *every("byte", range(300, 900, 40), random),  # the layout, and the messages after it
        *every("byte", [9000, 30_000], random),  # of the chunk
    ]

    await mirror_through(flips, trusted_link=True)

    assert sum(flip.flipped_s is not None for flip in flips) > 8


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_each_flipped_bit_changes_no_weights() -> None:
    """Every bit of the first headers, bytes of the handshake, and others, both ways."""
    random = Random(0)  # noqa: S311 (no secret)
    each_bit = [Flip(way, "header", number, bit) for number in range(60) for way in (True, False) for bit in range(8)]
    flips = [*each_bit, *every("handshake", range(600), random), *every("byte", range(0, 20_000, 100), random)]

    took_s = await mirror_through(flips)

    assert sum(flip.flipped_s is not None for flip in flips) > 1000
    assert took_s < 2 * HEARTBEAT_S


ALL, FEW = slice(None), slice(9)
"""Elements that the next version changes: so many that it is sent whole, or as a delta."""

# -- the command flag --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def published_through(flag: CommandFlag) -> AsyncIterator[tuple[WeightPublisher, WeightAddress]]:
    """Publish version 1; yield the address for a sampler of another host, through a relay."""
    async with (
        WeightPublisher(PUBLISHED) as publisher,
        publisher.serve("tcp://127.0.0.1:0", heartbeat_timeout_s=HEARTBEAT_S) as address,
        relayed(int(address.url.rpartition(":")[2]), lambda: flag) as port,
    ):
        await publisher.publish(PUBLISHED, 1)
        with anyio.fail_after(FAILSAFE_S):
            yield publisher, replace(address, url=f"tcp://127.0.0.1:{port}", host="another")


@pytest.mark.parametrize(
    ("to_publisher", "number", "changed"),
    [
        pytest.param(True, 2, ALL, id="ChunkRequest"),
        pytest.param(True, 3, ALL, id="PauseAck"),
        pytest.param(True, 4, ALL, id="DeltaRequest"),
        pytest.param(True, 5, ALL, id="ChunkRequest of the next version"),
        pytest.param(False, 2, ALL, id="NewVersion"),
        pytest.param(False, 3, ALL, id="Chunk"),
        pytest.param(False, 4, ALL, id="Pause"),
        pytest.param(False, 5, ALL, id="Resume"),
        pytest.param(False, 6, ALL, id="NewVersion of the next version"),
        pytest.param(False, 7, ALL, id="NoDelta"),
        pytest.param(False, 7, FEW, id="SpanDelta"),
        pytest.param(False, 8, ALL, id="Chunk of the next version"),
    ],
)
async def test_a_mirror_goes_on_after_a_message_that_was_dropped(
    *, to_publisher: bool, number: int, changed: slice
) -> None:
    flag, weights, newer = CommandFlag(to_publisher, number), zeros(), {"weight": PUBLISHED["weight"].copy()}
    newer["weight"][changed] += 1

    async with published_through(flag) as (publisher, address), WeightSubscriber(address) as subscriber:
        subscriber.attach(weights)
        await subscriber.newer()
        async with publisher.paused(FAILSAFE_S):
            pass
        async with subscriber.sampling():
            pass
        await publisher.publish(newer, 2)
        await subscriber.newer(1)
        subscriber.refresh()

    assert flag.flipped_s is not None
    assert np.array_equal(weights["weight"], newer["weight"])


@pytest.mark.parametrize(
    ("to_publisher", "number"),
    [
        pytest.param(True, 0, id="Subscribe"),
        pytest.param(True, 1, id="Ready of the mirror"),
        pytest.param(False, 0, id="WeightLayout"),
        pytest.param(False, 1, id="Ready of the publisher"),
    ],
)
async def test_a_message_of_the_handshake_that_was_dropped_is_told(*, to_publisher: bool, number: int) -> None:
    flag = CommandFlag(to_publisher, number)

    async with published_through(flag) as (_, address):
        with pytest.raises((NobodyListens, ProtocolMismatch)):
            await WeightSubscriber(address).__aenter__()

    assert flag.flipped_s is not None
