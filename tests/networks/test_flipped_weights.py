"""A relay flips one bit of a connection to published weights: the weights arrive as they are, or an error says why not.

The mirror of the other host connects again where a connection ends, so both ends have to be told that it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import numpy as np
from chaos.relay import relayed
from tests.failsafe import FAILSAFE_S
from tests.networks.test_flipped_bits import HEARTBEAT_S, Flip, every

from penstock.errors import PenstockError
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

AT_ONCE = 16
"""Connections at a time."""

PUBLISHED = {"weight": np.arange(2**13, dtype=np.float32)}
"""32 KB: one chunk, in which the flips of any byte lie."""


async def mirror(address: WeightAddress, name: str, flip: Flip) -> None:
    """Receive the weights through a relay, as a host of its own.

    Raises:
        AssertionError: other weights arrived.
    """
    failure: Exception | None = None
    weights: dict[str, Any] = {"weight": np.zeros_like(PUBLISHED["weight"])}
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


async def mirror_through(flips: Sequence[Flip]) -> None:
    """Subscribe once for each flip, `AT_ONCE` at a time; then no subscriber is left."""
    pending = iter(flips)
    async with (
        WeightPublisher(PUBLISHED) as publisher,
        publisher.serve("tcp://127.0.0.1:0", heartbeat_timeout_s=HEARTBEAT_S) as address,
    ):
        await publisher.publish(PUBLISHED, 1)

        async def take_turns(lane: int) -> None:
            for number, flip in enumerate(pending):
                await mirror(address, f"host {lane}-{number}", flip)

        async with anyio.create_task_group() as lanes:
            for lane in range(AT_ONCE):
                lanes.start_soon(take_turns, lane)
        with anyio.fail_after(FAILSAFE_S):
            while publisher.subscribers:  # noqa: ASYNC110 (each goes by itself)
                await anyio.sleep(0.01)


async def test_one_flipped_bit_changes_no_weights() -> None:
    random = Random(0)  # noqa: S311 (no secret)
    headers = every("header", [0, 1, 4, 6, 9, 13], random)
    flips = [*headers, *every("handshake", range(0, 300, 60), random), *every("byte", [9000], random)]

    await mirror_through(flips)

    assert sum(flip.flipped_s is not None for flip in flips) > 16
