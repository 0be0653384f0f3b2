from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.fixed_limits import set_limits
from tests.moments import moment
from tests.processes.children import child, line
from torch import nn

from penstock.errors import (
    NobodyListens,
    OutOfSharedMemory,
    PeerClosed,
    PeerLost,
    StaleHandle,
    WeightsDamaged,
    WeightsInUse,
    WeightsMismatch,
)
from penstock.torch import WeightFolder
from penstock.weights import FusedTensor, WeightSubscriber


@pytest.fixture(autouse=True)
def _polled_often(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, POLL_S=0.002)


def tied(value: float = 0.0) -> nn.Sequential:
    token, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    nn.init.constant_(token.weight, value)
    head.weight = token.weight
    return nn.Sequential(token, head)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[WeightFolder, WeightSubscriber]]:
    async with WeightFolder(folder, tied().state_dict()) as publisher, WeightSubscriber(publisher.url) as subscriber:
        yield publisher, subscriber


def values(model: nn.Module) -> set[float]:
    return {value for tensor in model.state_dict().values() for value in tensor.unique().tolist()}


async def refreshed(subscriber: WeightSubscriber) -> int:
    return await anyio.to_thread.run_sync(subscriber.refresh)


async def published(publisher: WeightFolder, *versions: int) -> None:
    for version in versions:
        await publisher.publish(tied(version).state_dict(), version)
        await publisher.written()


@asynccontextmanager
async def sampling_with(version: int, publisher: WeightFolder, subscriber: WeightSubscriber) -> AsyncIterator[None]:
    """Sample with `version` within the body, when the mirror has read the next; it reads no further one meanwhile."""
    await published(publisher, version)
    await subscriber.newer()
    async with subscriber.sampling():
        assert await refreshed(subscriber) == version
        await published(publisher, version + 1)
        await subscriber.newer()
        yield


def folders(path: Path) -> list[str]:
    return sorted(inner.name for inner in path.iterdir() if inner.is_dir())


def of(*versions: int) -> list[str]:
    return [f"step-{version:08d}" for version in versions]


async def test_a_models_tensors_are_views_of_the_version_that_was_read(tmp_path: Path) -> None:
    model = tied()

    async with pair(tmp_path) as (publisher, subscriber):
        subscriber.attach(model)
        for version in (1, 7):
            await published(publisher, version)
            assert await subscriber.newer() == version
            assert await refreshed(subscriber) == subscriber.version == version
            assert values(model) == {version}

    assert model[1].weight is model[0].weight
    assert not any(parameter.requires_grad for parameter in model.parameters())


async def test_tensors_by_name_are_filled_in_place(tmp_path: Path) -> None:
    model: dict[str, np.ndarray[Any, Any]] = {name: np.zeros((5, 4), np.float32) for name in ("0.weight", "1.weight")}

    async with pair(tmp_path) as (publisher, subscriber):
        subscriber.attach(model)
        await published(publisher, 3)
        await subscriber.newer()
        await refreshed(subscriber)

    assert all((np.asarray(tensor) == 3).all() for tensor in model.values())


class Interrupted(np.ndarray[Any, np.dtype[np.float32]]):
    """A tensor that calls `before` when it is filled the first time."""

    before: Callable[[], object] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        before, self.before = self.before, None
        if before is not None:
            before()
        super().__setitem__(key, value)


async def test_tensors_whose_version_is_overwritten_while_they_are_filled_are_filled_with_the_newest(
    tmp_path: Path,
) -> None:
    model: dict[str, Any] = {"0.weight": np.zeros((5, 4), np.float32), "1.weight": Interrupted((5, 4), np.float32)}

    async with pair(tmp_path) as (publisher, subscriber):

        async def overwrite() -> None:
            for version in (2, 3):
                await published(publisher, version)
                await subscriber.newer(than=version - 1)

        model["1.weight"].before = lambda: anyio.from_thread.run(overwrite)
        subscriber.attach(model)
        await published(publisher, 1)
        await subscriber.newer()
        assert await refreshed(subscriber) == 3

    assert all((tensor == 3).all() for tensor in model.values())


async def test_the_files_are_safetensors_of_what_was_fused_and_cast_and_old_ones_go(tmp_path: Path) -> None:
    given = {"q": torch.ones(2, 3), "k": torch.zeros(1, 3), "step": torch.tensor(4)}
    model = {"q": torch.zeros(2, 3, dtype=torch.bfloat16), "k": torch.ones(1, 3, dtype=torch.bfloat16)}
    rule = [FusedTensor("qk", ("q", "k"))]

    async with WeightFolder(tmp_path, given, fused=rule, cast={"float32": "bfloat16"}) as publisher:
        for version in (1, 2, 3):
            await publisher.publish(given, version)
        async with WeightSubscriber(publisher.url) as subscriber:
            subscriber.attach(model | {"step": torch.tensor(0)}, fused=rule)
            await subscriber.newer()
            await refreshed(subscriber)

    assert folders(tmp_path) == of(2, 3)
    file = load_file(tmp_path / of(3)[0] / "weights.safetensors")
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in file.items()} == {
        "qk": (torch.bfloat16, (3, 3)),
        "step": (torch.int64, ()),
    }
    assert [model["q"].sum().item(), model["k"].sum().item()] == [6, 0]


async def test_a_model_that_does_not_fit_is_refused_before_the_first_version(tmp_path: Path) -> None:
    async with pair(tmp_path) as (publisher, subscriber):
        with pytest.raises(WeightsMismatch, match=r"0\.weight: expected float64 \[5, 4\], found float32 \[5, 4\]"):
            subscriber.attach(tied().double())
        with pytest.raises(WeightsMismatch, match=r"1\.weight: expected float32 \[5, 4\], found none"):
            await publisher.publish({"0.weight": torch.zeros(5, 4)}, 1)
        with pytest.raises(RuntimeError, match=r"call attach\(model\) first"):
            await refreshed(subscriber)
        await publisher.publish(tied().state_dict(), 1)
        with pytest.raises(ValueError, match="version: expected one above 1, got 1"):
            await publisher.publish(tied().state_dict(), 1)


def attached(subscriber: WeightSubscriber) -> WeightSubscriber:
    subscriber.attach(tied())
    return subscriber


def torn(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def altered(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"\x55")


def forged(file: Path) -> None:
    files = msgspec.json.decode(file.read_bytes())["files"]
    files["weights.safetensors"]["xxh3"] = "0" * 32
    file.write_bytes(msgspec.json.encode({"files": files}))


def emptied(file: Path) -> None:
    file.write_bytes(msgspec.json.encode({"files": {}}))


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        ("weights.safetensors", torn, r"expected \d+ bytes, got \d+: it is torn"),
        ("weights.safetensors", altered, r"expected xxh3 \w+, got \w+: it was altered"),
        ("weights.safetensors", Path.unlink, r"expected .*weights\.safetensors, got none: No such file"),
        ("manifest.json", forged, r"expected xxh3 0{32}, got \w+: it was altered"),
        (
            "manifest.json",
            emptied,
            r"manifest\.json: expected the hash of weights\.safetensors, got none: it was altered",
        ),
        ("manifest.json", torn, r"manifest\.json: expected to read back what was written, got "),
        ("manifest.json", Path.unlink, r"expected .*manifest\.json, got none: No such file"),
    ],
    ids=["torn", "altered", "absent", "forged manifest", "manifest of no file", "torn manifest", "absent manifest"],
)
async def test_a_damaged_version_is_refused_with_the_reason_and_the_model_stays(
    tmp_path: Path, name: str, harm: Callable[[Path], None], reason: str
) -> None:
    model = tied()

    async with pair(tmp_path) as (publisher, subscriber):
        subscriber.attach(model)
        async with sampling_with(0, publisher, subscriber):
            await published(publisher, 2)
            harm(tmp_path / of(2)[0] / name)
        assert await refreshed(subscriber) == 1
        for raises in (subscriber.newer(), refreshed(subscriber)):
            with pytest.raises(WeightsDamaged, match=reason):
                await raises

    assert subscriber.version == 1
    assert values(model) == {1}


async def test_after_a_damaged_version_samplers_that_subscribe_again_have_the_next(tmp_path: Path) -> None:
    async with pair(tmp_path) as (publisher, subscriber):
        async with sampling_with(0, publisher, attached(subscriber)):
            await published(publisher, 2)
            altered(tmp_path / of(2)[0] / "weights.safetensors")
        with pytest.raises(WeightsDamaged):
            await subscriber.newer(than=1)
        await published(publisher, 3)

        async with WeightSubscriber(publisher.url) as again:
            assert await again.newer() == 3


async def test_a_version_that_is_deleted_before_it_is_read_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    async with pair(tmp_path) as (publisher, subscriber):
        async with sampling_with(0, publisher, attached(subscriber)):
            await published(publisher, 2, 3, 4)
            assert subscriber.latest == 1
        await subscriber.newer(than=1)
        assert await refreshed(subscriber) == 4


# -- the mirror --------------------------------------------------------------------------------------------------------


async def test_a_sampler_that_joins_later_shares_the_copy_that_another_one_of_its_host_has_read(tmp_path: Path) -> None:
    model = tied()

    async with pair(tmp_path) as (publisher, subscriber):
        await published(publisher, 1)
        await subscriber.newer()
        (tmp_path / of(1)[0] / "weights.safetensors").unlink()
        async with WeightSubscriber(publisher.url) as later:
            later.attach(model)
            await later.newer()
            assert await refreshed(later) == 1

    assert values(model) == {1}


async def test_a_batch_keeps_its_version_however_many_are_published_and_the_next_has_the_newest(tmp_path: Path) -> None:
    model = tied()

    async with pair(tmp_path) as (publisher, subscriber):
        subscriber.attach(model)
        async with sampling_with(0, publisher, subscriber):
            await published(publisher, 2, 3, 4, 5)
            assert subscriber.intact
            assert subscriber.stale
            assert values(model) == {0}
        await subscriber.newer(than=1)
        async with subscriber.sampling():
            assert await refreshed(subscriber) == 5
            assert subscriber.intact
            assert values(model) == {5}


def is_open(file: Path) -> bool:
    """Return whether this process has `file` open."""
    return any(os.path.realpath(opened) == str(file) for opened in Path("/proc/self/fd").iterdir())


async def test_a_sampler_that_closes_waits_for_no_version_that_is_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, CHUNK_BYTES=1)
    weights = {"weight": torch.zeros(2**20)}

    async with WeightFolder(tmp_path, weights) as publisher:
        await publisher.publish(weights, 1)
        async with WeightSubscriber(publisher.url) as subscriber:
            while not is_open(tmp_path / of(1)[0] / "weights.safetensors"):
                await moment()

    assert subscriber.latest == -1


SAMPLING = """
    import os, sys, anyio, anyio.to_thread, numpy
    from penstock.weights import WeightSubscriber

    async def main():
        model = {name: numpy.zeros((5, 4), numpy.float32) for name in ("0.weight", "1.weight")}
        async with WeightSubscriber(sys.argv[1]) as subscriber:
            subscriber.attach(model)
            print("attached", flush=True)
            while True:
                await subscriber.newer()
                version = await anyio.to_thread.run_sync(subscriber.refresh)
                assert all((tensor == version).all() for tensor in model.values()), model
                print(version, flush=True)

    os.environ["XDG_RUNTIME_DIR"] = sys.argv[2]
    anyio.run(main)
"""
"""Samples on the host whose sockets lie in the folder of the second argument."""


async def test_when_the_process_that_reads_is_killed_another_one_of_its_host_takes_over(tmp_path: Path) -> None:
    (host := tmp_path / "host").mkdir()

    async with WeightFolder(tmp_path / "weights", tied().state_dict()) as publisher:
        with child(SAMPLING, publisher.url, str(host)) as first:
            assert await line(first) == "attached"
            with child(SAMPLING, publisher.url, str(host)) as second:
                assert await line(second) == "attached"
                await published(publisher, 1)
                assert [await line(each) for each in (first, second)] == ["1"] * 2

                first.send_signal(signal.SIGKILL)
                await published(publisher, 2)

                assert await line(second) == "2"


async def test_a_host_whose_samplers_keep_a_version_delays_no_other_host(tmp_path: Path) -> None:
    (host := tmp_path / "host").mkdir()

    async with pair(tmp_path / "weights") as (publisher, subscriber):
        with child(SAMPLING, publisher.url, str(host)) as elsewhere:
            assert await line(elsewhere) == "attached"
            async with sampling_with(0, publisher, attached(subscriber)):
                await published(publisher, 5)
                while await line(elsewhere) != "5":
                    pass
                assert subscriber.latest == 1


async def test_a_host_without_room_for_two_versions_says_how_much_was_wanted(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**30, bias=False)

    async with WeightFolder(tmp_path, model) as publisher:
        with pytest.raises(
            OutOfSharedMemory, match=r"expected \d+ bytes of shared memory for 1 tensors, twice, got none"
        ):
            async with WeightSubscriber(publisher.url):
                pass


# -- publishers --------------------------------------------------------------------------------------------------------


async def test_a_folder_has_one_publisher_and_holds_nothing_else(tmp_path: Path) -> None:
    async with pair(tmp_path / "weights"):
        with pytest.raises(WeightsInUse, match=r"process \d+ \(.+\) publishes into it"):
            async with WeightFolder(tmp_path / "weights", tied().state_dict()):
                pass
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "optimizer.pt").touch()

    with pytest.raises(ValueError, match=r"to be empty, or of published weights, got \['step-00000001', 'weights'\]"):
        async with WeightFolder(tmp_path, tied().state_dict()):
            pass


async def test_a_closed_publisher_an_absent_one_and_another_one_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(NobodyListens, match=f"expected a publisher at file://{tmp_path}, got none"):
        async with WeightSubscriber(f"file://{tmp_path}"):
            pass
    async with WeightFolder(tmp_path / "a", tied().state_dict()) as publisher:
        await published(publisher, 1)
    with pytest.raises(anyio.ClosedResourceError):
        await published(publisher, 2)

    for _ in range(2):
        async with WeightSubscriber(publisher.url) as subscriber, WeightSubscriber(publisher.url) as other:
            for each in (attached(subscriber), attached(other)):
                assert (await each.newer(), await refreshed(each), await refreshed(each)) == (1, 1, 1)
                with pytest.raises(PeerClosed, match="closed at version 1: nothing above 1 will come"):
                    await each.newer()

    async with (
        pair(tmp_path / "a") as (publisher, subscriber),
        WeightFolder(tmp_path / "b", tied().state_dict(), name="a second run"),
    ):
        (tmp_path / "b" / "publisher.json").replace(tmp_path / "a" / "publisher.json")
        with pytest.raises(StaleHandle, match="got those of a second run: subscribe again"):
            await subscriber.newer()


async def test_the_next_publisher_of_a_folder_has_subscribers_beside_those_of_the_one_before(tmp_path: Path) -> None:
    async with WeightFolder(tmp_path, tied().state_dict()) as first:
        await published(first, 7)

    async with WeightSubscriber(first.url) as before:
        assert await before.newer() == 7
        async with pair(tmp_path) as (publisher, subscriber):
            await published(publisher, 1)
            assert await subscriber.newer() == 1
            assert before.latest == 7


async def test_a_folder_whose_header_describes_no_tensors_has_no_publisher(tmp_path: Path) -> None:
    async with WeightFolder(tmp_path, tied().state_dict()) as publisher:
        owner = msgspec.json.decode((tmp_path / "publisher.json").read_bytes())
        del owner["checksum"]
        owner["header"]["0.weight"]["shape"] = [5, 2**50]
        (tmp_path / "publisher.json").write_bytes(msgspec.json.encode(owner))
        with pytest.raises(NobodyListens, match="expected tensors without gaps, ordered by alignment"):
            async with WeightSubscriber(publisher.url):
                pass


PUBLISHING = """
    import os, sys, anyio, torch
    from penstock.torch import WeightFolder

    def stuck(fd):
        print("writing", flush=True)
        sys.stdin.readline()

    async def main():
        weights = {"0.weight": (token := torch.ones(5, 4)), "1.weight": token}
        async with WeightFolder(sys.argv[1], weights, name="trainer") as publisher:
            await publisher.publish(weights, 1)
            await publisher.written()
            os.fsync = stuck
            await publisher.publish(weights, 2)

    anyio.run(main)
"""


async def test_a_publisher_killed_while_it_writes_leaves_its_last_version_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    model = tied()

    with child(PUBLISHING, str(tmp_path)) as publisher:
        assert await line(publisher) == "writing"
        async with WeightSubscriber(f"file://{tmp_path}") as subscriber:
            subscriber.attach(model)
            await subscriber.newer()
            publisher.send_signal(signal.SIGKILL)
            await anyio.to_thread.run_sync(publisher.wait)
            assert await refreshed(subscriber) == 1
            for _ in range(2):
                with pytest.raises(PeerLost, match=r"trainer died: its lock on .* is released"):
                    await subscriber.newer()
            async with WeightSubscriber(f"file://{tmp_path}") as later:
                assert await later.newer() == 1
                with pytest.raises(PeerLost, match="trainer died"):
                    await later.newer(than=1)
    left = folders(tmp_path)

    async with WeightFolder(tmp_path, tied().state_dict()):
        assert left == [".unfinished-2", "step-00000001"]
        assert not folders(tmp_path)

    assert values(model) == {1}


async def test_samplers_that_read_a_folder_cannot_be_paused(tmp_path: Path) -> None:
    async with pair(tmp_path) as (publisher, _):
        generation: Any = publisher
        with pytest.raises(RuntimeError, match=r"SinkTrainer\(sampling='overlap'\)"):
            generation.paused()


async def test_an_exception_of_the_body_is_raised_and_the_lock_released_although_the_folder_was_moved(
    tmp_path: Path,
) -> None:
    publisher = WeightFolder(tmp_path / "weights", tied().state_dict())

    async def move_folder() -> None:
        async with publisher:
            (tmp_path / "weights").rename(tmp_path / "elsewhere")
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await move_folder()

    assert "closed" in repr(publisher)
