"""Records and weights through a TCP proxy that closes idle connections, stalls, cuts and slows them down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from anyio.abc import SocketAttribute, SocketStream, TaskStatus
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits
from tests.moments import moment
from tests.networks.proxy import Proxy, proxied
from tests.processes.test_members import SavesAtOnce

from penstock import TrajectoryGroup
from penstock.channels import connect, connect_with_replay, serve
from penstock.errors import PeerLost
from penstock.testing import group
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

LOOPBACK = "tcp://127.0.0.1:0"

HEARTBEAT_S = 3.0
"""Longer than a process waits for a core on a busy machine. A heartbeat is sent every third of it."""

BEATS = 20
"""Heartbeats, and their answers: they take longer than `HEARTBEAT_S` together."""


def weights(version: int) -> dict[str, Any]:
    return {"weight": np.full(2**20, version, np.float32)}


@asynccontextmanager
async def published(**options: Any) -> AsyncIterator[tuple[WeightPublisher, Proxy, WeightSubscriber]]:
    """Publish, and subscribe as a sampler of another host, through a proxy."""
    async with (
        WeightPublisher(weights(0)) as publisher,
        publisher.serve(LOOPBACK, heartbeat_timeout_s=HEARTBEAT_S) as address,
        proxied(address.url, **options) as (proxy, url),
        WeightSubscriber(replace(address, url=url, host="another")) as subscriber,
    ):
        yield publisher, proxy, subscriber


# -- idle connections --------------------------------------------------------------------------------------------------


async def test_heartbeats_keep_a_proxy_from_closing_the_idle_connection_of_a_sender() -> None:
    async with (
        serve(LOOPBACK, TrajectoryGroup, heartbeat_timeout_s=HEARTBEAT_S) as inbox,
        proxied(inbox.url, idle_timeout_s=HEARTBEAT_S) as (proxy, url),
        connect(url, TrajectoryGroup, heartbeat_timeout_s=HEARTBEAT_S) as outbox,
    ):
        await proxy.until_parts(BEATS)
        await outbox.send(group(instance_id="after"))
        assert (await inbox.receive()).instance_id == "after"
        assert proxy.connections == 1


async def test_heartbeats_keep_a_proxy_from_closing_the_idle_connection_of_a_mirror() -> None:
    async with published(idle_timeout_s=HEARTBEAT_S) as (publisher, proxy, subscriber):
        await proxy.until_parts(BEATS)
        await publisher.publish(weights(1), 1)
        assert await subscriber.newer() == 1
        assert proxy.connections == 1


async def test_without_heartbeats_a_proxy_closes_an_idle_connection_and_a_replaying_sender_makes_it_again() -> None:
    async with (
        serve(LOOPBACK, TrajectoryGroup, heartbeat_timeout_s=None, listener=SavesAtOnce()) as inbox,
        proxied(inbox.url, idle_timeout_s=0.2) as (proxy, url),
        connect_with_replay(url, heartbeat_timeout_s=None) as outbox,
    ):
        with anyio.fail_after(FAILSAFE_S):
            while proxy.connections < 3:
                await moment()
        proxy.idle_timeout_s = float("inf")
        await outbox.send(group(instance_id="after", completion_lengths=[2]))
        assert (await inbox.receive()).instance_id == "after"


# -- connections that are cut, stalled and slow ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Proxy.cut, Proxy.stall], ids=["cut", "stall"])
async def test_a_replaying_sender_sends_again_what_did_not_arrive(fault: Any) -> None:
    received: set[str] = set()
    with capture_logs() as logs:
        async with (
            serve(LOOPBACK, TrajectoryGroup, heartbeat_timeout_s=HEARTBEAT_S, listener=SavesAtOnce()) as inbox,
            proxied(inbox.url) as (proxy, url),
            connect_with_replay(url, heartbeat_timeout_s=HEARTBEAT_S) as outbox,
            anyio.create_task_group() as tasks,
        ):

            async def receive() -> None:
                while True:
                    received.add((await inbox.receive()).instance_id)

            async def send(numbers: range) -> None:
                for number in numbers:
                    await outbox.send(group(instance_id=str(number), completion_lengths=[2]))

            inbox.keep_open()
            tasks.start_soon(receive)
            await send(range(20))
            fault(proxy)
            await send(range(20, 40))
            with anyio.fail_after(FAILSAFE_S):
                while not any(entry["event"] == "receiver_disconnected" for entry in logs):
                    await moment()
                proxy.resume()
                while outbox.unsaved:
                    await moment()
            tasks.cancel_scope.cancel()

    assert received == {str(number) for number in range(40)}
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"].count("receiver_disconnected") == 1


@pytest.mark.parametrize("fault", [Proxy.cut, Proxy.stall], ids=["cut", "stall"])
async def test_a_mirror_continues_a_transfer_that_was_interrupted(fault: Any) -> None:
    with capture_logs() as logs:
        async with published() as (publisher, proxy, subscriber):
            subscriber.attach(model := weights(0))
            proxy.part_s = 0.01
            await publisher.publish(weights(1), 1)
            await proxy.until_parts(50)  # of more than 256
            fault(proxy)
            with anyio.fail_after(FAILSAFE_S):
                while not any(entry["event"] == "weights_reconnect" for entry in logs):
                    await moment()
                proxy.part_s = 0
                proxy.resume()
                assert await subscriber.newer() == 1
            assert await anyio.to_thread.run_sync(subscriber.refresh) == 1

    assert (model["weight"] == 1).all()
    events = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert events.count("weights_reconnect") == 1  # the publisher may have noticed the silence too, before or after


async def test_a_sender_that_closes_waits_while_its_records_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, CLOSE_TIMEOUT_S=2.0)
    record = group(completion_lengths=[100_000])
    async with (
        serve(LOOPBACK, TrajectoryGroup) as inbox,
        proxied(inbox.url) as (proxy, url),
        anyio.create_task_group() as tasks,
    ):
        proxy.part_s = 0.04  # the record takes several times that bound

        async def send() -> None:
            async with connect(url, TrajectoryGroup) as outbox:
                for _ in range(3):
                    await outbox.send(record)

        tasks.start_soon(send)
        assert [(await inbox.receive()).nbytes for _ in range(3)] == [record.nbytes] * 3
        with pytest.raises(anyio.EndOfStream):  # not PeerLost
            await inbox.receive()


async def subscribe_until(leaving: anyio.Event, address: WeightAddress, *, task_status: TaskStatus[None]) -> None:
    async with WeightSubscriber(address):
        task_status.started()
        await leaving.wait()


async def test_a_sampler_whose_mirror_ends_during_a_cut_takes_over_when_the_link_is_back() -> None:
    leaving = anyio.Event()
    async with (
        WeightPublisher(weights(0)) as publisher,
        publisher.serve(LOOPBACK) as address,
        proxied(address.url) as (proxy, url),
        closing_port() as port,
        anyio.create_task_group() as tasks,
    ):
        far = replace(address, url=url, host="another")
        await tasks.start(subscribe_until, leaving, far)  # it becomes the mirror
        async with WeightSubscriber(far) as subscriber:
            await publisher.publish(weights(1), 1)
            assert await subscriber.newer() == 1

            upstream, proxy.to = proxy.to, port
            proxy.cut()
            leaving.set()
            with anyio.fail_after(FAILSAFE_S):
                while proxy.connections < 6:  # one of the mirror, and attempts
                    await moment()
            proxy.to = upstream
            await publisher.publish(weights(2), 2)

            assert await subscriber.newer(1) == 2


async def test_a_publisher_that_a_proxy_does_not_reach_any_more_is_lost_after_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, RECONNECT_TIMEOUT_S=0.5)
    with capture_logs() as logs:
        async with published() as (publisher, proxy, subscriber), closing_port() as port:
            await publisher.publish(weights(1), 1)
            await subscriber.newer()
            proxy.to = port
            proxy.cut()
            with pytest.raises(PeerLost, match="is lost: it closed the connection"):
                await subscriber.newer(1)

    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == [
        "weights_reconnect",
        "weights_lost",
    ]


@asynccontextmanager
async def closing_port() -> AsyncIterator[int]:
    """Listen at a port that closes each connection at once."""

    async def close(connection: SocketStream) -> None:
        await connection.aclose()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, close)
        yield listener.extra(SocketAttribute.local_port)  # noqa: S610 (an attribute of a socket)
        tasks.cancel_scope.cancel()
