"""Weights over real sockets: publisher and subscribers in one process, and in processes that are killed."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from tests.failsafe import FAILSAFE_S
from tests.moments import moment
from tests.processes.children import child, line

from penstock.errors import NobodyListens, PeerClosed, PeerLost, WeightsMismatch
from penstock.weights import WeightPublisher, WeightSubscriber


def tensors(value: float = 0.0) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.full((4, 3), value, np.float32), "bias": np.full(3, value, np.float32)}


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[WeightPublisher, WeightSubscriber]]:
    async with WeightPublisher(tensors()) as publisher, WeightSubscriber(publisher.url, name="a") as subscriber:
        yield publisher, subscriber


def exists(path: Path) -> bool:
    return path.exists()


# -- versions ----------------------------------------------------------------------------------------------------------


async def test_a_subscriber_gets_the_newest_version() -> None:
    model = tensors()

    async with pair() as (publisher, subscriber):
        subscriber.attach(model)
        await publisher.publish(tensors(1), version=1)
        await publisher.publish(tensors(7), version=7)
        assert subscriber.refresh() == subscriber.version == subscriber.latest == publisher.version == 7

    assert all((np.asarray(tensor) == 7).all() for tensor in model.values())


async def test_before_the_first_version_there_is_nothing_to_load() -> None:
    async with pair() as (_, subscriber):
        subscriber.attach(tensors())

        assert (subscriber.latest, subscriber.refresh()) == (-1, -1)


async def test_the_newest_version_is_read_from_memory_without_asking_anyone() -> None:
    async with pair() as (publisher, subscriber):
        publisher._opened().write(tensors(), 5)  # no await: no message was sent meanwhile

        assert subscriber.latest == 5


async def test_refresh_copies_only_a_newer_version() -> None:
    model = tensors()

    async with pair() as (publisher, subscriber):
        subscriber.attach(model)
        await publisher.publish(tensors(1), version=1)
        subscriber.refresh()
        np.asarray(model["bias"])[:] = 99
        subscriber.refresh()

    assert (np.asarray(model["bias"]) == 99).all()


async def test_waiting_for_a_newer_version_ends_when_there_is_one() -> None:
    seen: list[int] = []

    async def wait(subscriber: WeightSubscriber) -> None:
        seen.append(await subscriber.newer())
        seen.append(await subscriber.newer(than=seen[0]))

    async with pair() as (publisher, subscriber), anyio.create_task_group() as tasks:
        tasks.start_soon(wait, subscriber)
        await publisher.publish(tensors(), version=0)
        while not seen:
            await moment()
        await publisher.publish(tensors(), version=3)

    assert seen == [0, 3]


async def test_a_late_joiner_finds_the_newest_version() -> None:
    async with WeightPublisher(tensors()) as publisher:
        await publisher.publish(tensors(), version=4)
        async with WeightSubscriber(publisher.url) as subscriber:
            assert await subscriber.newer() == 4


async def test_every_subscriber_is_notified_of_a_version() -> None:
    async with pair() as (publisher, a), WeightSubscriber(publisher.url, name="b") as b:
        await publisher.publish(tensors(), version=0)

        assert [await a.newer(), await b.newer()] == [0, 0]
        assert publisher.subscribers == [f"a (pid {os.getpid()})", f"b (pid {os.getpid()})"]


async def test_a_model_that_does_not_fit_is_refused_with_every_difference() -> None:
    model: dict[str, np.ndarray[Any, Any]] = {"weight": np.zeros((4, 3), np.float64), "head": np.zeros(2, np.float32)}

    async with pair() as (_, subscriber):
        with pytest.raises(WeightsMismatch) as caught:
            subscriber.attach(model)

    assert str(caught.value).splitlines()[1:] == [
        "  weight: expected float64 [4, 3], found float32 [4, 3]",
        "  head: expected float32 [2], found none",
        "  bias: expected no such tensor, found float32 [3]",
    ]


async def test_refreshing_without_a_model_names_the_remedy() -> None:
    async with pair() as (_, subscriber):
        with pytest.raises(RuntimeError, match=r"call attach\(model\) first"):
            subscriber.refresh()


async def test_publishing_other_tensors_is_refused() -> None:
    async with WeightPublisher(tensors()) as publisher:
        with pytest.raises(WeightsMismatch, match=r"bias: expected float32 \[3\], found none"):
            await publisher.publish({"weight": tensors()["weight"]}, version=0)


async def test_a_closed_publisher_publishes_nothing() -> None:
    async with WeightPublisher(tensors()) as publisher:
        pass

    with pytest.raises(anyio.ClosedResourceError):
        await publisher.publish(tensors(), version=0)


FULL_SPEED = """
    import sys, anyio, numpy as np
    from penstock.weights import WeightPublisher

    def tensors(version):
        return {name: np.full(1_000_000, version, np.int64) for name in ("first", "second")}

    async def main():
        async with WeightPublisher(tensors(0)) as publisher:
            print(publisher.url, flush=True)
            for version in range(10**9):
                await publisher.publish(tensors(version), version)

    anyio.run(main)
"""


async def test_a_process_publishing_at_full_speed_never_shows_a_mixture() -> None:
    model: dict[str, np.ndarray[Any, Any]] = {name: np.zeros(1_000_000, np.int64) for name in ("first", "second")}
    versions: list[int] = []

    with child(FULL_SPEED) as publisher:
        async with WeightSubscriber(await line(publisher)) as subscriber:
            subscriber.attach(model)
            while len(versions) < 30:
                versions.append(await subscriber.newer())
                version = await anyio.to_thread.run_sync(subscriber.refresh)
                assert all((np.asarray(tensor) == max(version, 0)).all() for tensor in model.values())

    assert versions == sorted(versions)


# -- pausing -----------------------------------------------------------------------------------------------------------


async def test_a_pause_waits_until_sampling_has_stopped() -> None:
    story: list[str] = []

    async def sample(subscriber: WeightSubscriber, entered: anyio.Event) -> None:
        async with subscriber.sampling():
            entered.set()
            while not subscriber.paused:
                await moment()
            story.append("last token")

    async with pair() as (publisher, subscriber), anyio.create_task_group() as tasks:
        entered = anyio.Event()
        tasks.start_soon(sample, subscriber, entered)
        await entered.wait()
        async with publisher.paused():
            story.append("paused")

    assert story == ["last token", "paused"]


async def test_no_subscriber_samples_during_a_pause_and_all_do_after_it() -> None:
    story: list[str] = []

    async def sample(subscriber: WeightSubscriber) -> None:
        async with subscriber.sampling():
            story.append("sampled")

    async with pair() as (publisher, subscriber), anyio.create_task_group() as tasks, publisher.paused():
        tasks.start_soon(sample, subscriber)
        await publisher.publish(tensors(), version=0)
        await subscriber.newer()
        story.append("published")

    assert story == ["published", "sampled"]


async def test_sampling_goes_on_when_the_body_of_a_pause_raises() -> None:
    async with pair() as (publisher, subscriber):
        with suppress(ZeroDivisionError):
            async with publisher.paused():
                raise ZeroDivisionError
        async with subscriber.sampling():
            pass


async def test_sampling_goes_on_when_a_pause_is_cancelled_while_it_waits() -> None:
    async with pair() as (publisher, subscriber):
        async with subscriber.sampling(), anyio.create_task_group() as tasks:
            tasks.start_soon(pause, publisher)
            while not subscriber.paused:
                await moment()
            tasks.cancel_scope.cancel()
        async with subscriber.sampling():
            pass


async def pause(publisher: WeightPublisher) -> None:
    async with publisher.paused():
        pass


async def test_pauses_within_pauses_end_with_the_outermost() -> None:
    async with pair() as (publisher, subscriber):
        async with publisher.paused():
            async with publisher.paused():
                pass
            assert publisher._subscriptions.pause
        async with subscriber.sampling():
            assert not subscriber.paused


async def test_a_late_joiner_joins_paused() -> None:
    async with pair() as (publisher, _), publisher.paused(), WeightSubscriber(publisher.url) as subscriber:
        assert subscriber.paused


async def test_a_subscriber_that_does_not_stop_is_named_and_the_pause_given_up() -> None:
    async with pair() as (publisher, subscriber):
        async with subscriber.sampling():
            with pytest.raises(TimeoutError, match=r"stop sampling within 0\.01 s, \['a \(pid"):
                async with publisher.paused(pause_timeout_s=0.01):
                    pass
        async with subscriber.sampling():
            pass


# -- processes that die or close ---------------------------------------------------------------------------------------

SAMPLING = """
    import sys, anyio
    from penstock.weights import WeightSubscriber

    async def main():
        async with WeightSubscriber(sys.argv[1]) as subscriber, subscriber.sampling():
            print("sampling", flush=True)
            await anyio.sleep_forever()

    anyio.run(main)
"""


async def test_a_subscriber_killed_during_a_pause_does_not_hang_the_publisher() -> None:
    async with WeightPublisher(tensors()) as publisher:
        with child(SAMPLING, publisher.url) as sampler:
            assert await line(sampler) == "sampling"
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pause, publisher)
                while not publisher._subscriptions.pause:
                    await moment()
                sampler.send_signal(signal.SIGKILL)

        assert publisher.subscribers == []


async def test_a_stopped_subscriber_does_not_hold_up_publishing() -> None:
    async with WeightPublisher(tensors()) as publisher:
        with child(SAMPLING, publisher.url) as sampler:
            await line(sampler)
            sampler.send_signal(signal.SIGSTOP)
            with anyio.fail_after(FAILSAFE_S):
                for version in range(200):
                    await publisher.publish(tensors(), version)


PUBLISHING = """
    import anyio, numpy as np
    from penstock.weights import WeightPublisher

    async def main():
        tensors = {"weight": np.ones((4, 3), np.float32), "bias": np.ones(3, np.float32)}
        async with WeightPublisher(tensors, name="trainer") as publisher:
            await publisher.publish(tensors, version=2)
            print(publisher.url, flush=True)
            await anyio.sleep_forever()

    anyio.run(main)
"""


async def test_a_killed_publisher_is_a_lost_peer_and_its_last_version_stays() -> None:
    model = tensors()

    with child(PUBLISHING) as publisher:
        async with WeightSubscriber(await line(publisher)) as subscriber:
            publisher.send_signal(signal.SIGKILL)
            with pytest.raises(PeerLost, match=r"trainer at weights:///.* died"):
                await subscriber.newer(than=2)
            subscriber.attach(model)
            assert (subscriber.latest, subscriber.refresh()) == (2, 2)
            with pytest.raises(PeerLost):
                subscriber.refresh()
            with pytest.raises(PeerLost):
                async with subscriber.sampling():
                    pass

    assert (np.asarray(model["weight"]) == 1).all()


async def test_the_death_of_the_publisher_ends_a_wait_for_the_end_of_a_pause() -> None:
    paused = PUBLISHING.replace("await anyio.sleep_forever()", "async with publisher.paused(): await anyio.sleep(99)")

    with child(paused) as publisher:
        async with WeightSubscriber(await line(publisher)) as subscriber:
            while not subscriber.paused:
                await moment()
            publisher.send_signal(signal.SIGKILL)
            with pytest.raises(PeerLost):
                async with subscriber.sampling():
                    pass


async def test_a_killed_publisher_leaves_a_directory_that_the_next_one_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # a folder that no other process cleans
    with child(PUBLISHING) as publisher:
        directory = Path((await line(publisher)).removeprefix("weights://"))
    assert exists(directory)

    async with WeightPublisher(tensors()):
        assert not exists(directory)


async def serve(closing: anyio.Event, *, task_status: TaskStatus[str]) -> None:
    async with WeightPublisher(tensors()) as publisher:
        await publisher.publish(tensors(3), version=3)
        task_status.started(publisher.url)
        await closing.wait()


async def test_a_publisher_that_closes_leaves_its_subscribers_sampling() -> None:
    closing = anyio.Event()

    async with anyio.create_task_group() as tasks, WeightSubscriber(await tasks.start(serve, closing)) as subscriber:
        subscriber.attach(tensors())
        closing.set()
        with pytest.raises(PeerClosed, match="closed at version 3: nothing above 3 will come"):
            await subscriber.newer(than=3)
        async with subscriber.sampling():
            assert (subscriber.refresh(), subscriber.refresh()) == (3, 3)


async def test_a_subscriber_that_left_is_not_waited_for() -> None:
    async with pair() as (publisher, subscriber):
        await subscriber.__aexit__(None, None, None)
        async with publisher.paused():
            pass


async def test_a_cancelled_publisher_cleans_up() -> None:
    directories: list[Path] = []

    async with anyio.create_task_group() as tasks, pair() as (publisher, _):
        directories.append(Path(publisher.url.removeprefix("weights://")))
        tasks.cancel_scope.cancel()
        await checkpoint()

    assert not exists(*directories)


async def test_an_error_in_the_body_arrives_as_it_was_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        async with pair():
            raise ZeroDivisionError


# -- the control socket ------------------------------------------------------------------------------------------------


async def test_the_control_socket_is_private_and_removed_afterwards() -> None:
    async with WeightPublisher(tensors()) as publisher:
        directory = Path(publisher.url.removeprefix("weights://"))
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "control")]

    assert modes == [0o700, 0o600]
    assert not exists(directory)


@pytest.mark.parametrize("url", ["weights:///nowhere", "weights:///tmp"])
async def test_a_url_without_a_publisher_is_an_error_at_once(url: str) -> None:
    with pytest.raises(NobodyListens, match=f"expected a publisher at {url}"):
        async with WeightSubscriber(url):
            pass


async def test_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with weights:// or file://, got 'shm:///x'"):
        async with WeightSubscriber("shm:///x"):
            pass


@pytest.mark.parametrize("noise", [b"", b"\x05\x00\x00\x00hello", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"])
async def test_invalid_bytes_on_the_control_connection_affect_no_subscriber(noise: bytes) -> None:
    async with pair() as (publisher, subscriber):
        stranger = await anyio.connect_unix(publisher.url.removeprefix("weights://") + "/control")
        if noise:
            await stranger.send(noise)
        await publisher.publish(tensors(), version=0)
        assert await subscriber.newer() == 0
        await stranger.aclose()


async def test_a_publisher_that_closes_the_connection_at_once_is_a_lost_peer(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "control"))
    server.listen()

    with server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, close_after_accepting, server)
            with pytest.raises(PeerLost, match="closed the connection before it sent weights"):
                async with WeightSubscriber(f"weights://{tmp_path}"):
                    pass


def close_after_accepting(server: socket.socket) -> None:
    server.accept()[0].close()


async def test_use_outside_async_with_is_an_error() -> None:
    subscriber = WeightSubscriber("weights:///nowhere")

    with pytest.raises(RuntimeError, match="use it within `async with`"):
        subscriber.attach(tensors())
