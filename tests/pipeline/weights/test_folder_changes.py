"""A mirror that has the version before reads only what changed since then, and has the bytes of the whole version."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from structlog.testing import capture_logs
from tests.fixed_limits import set_limits
from torch import nn

from penstock.errors import WeightsDamaged
from penstock.torch import WeightFolder
from penstock.weights import WeightSubscriber

WHOLE, CHANGES, VERSION = "weights.safetensors", "changes.delta", "version.json"

SPAN_ELEMENTS = 4 * 2**20
"""Elements of 16 bits in a span of a version, 8 MiB."""


@pytest.fixture(autouse=True)
def _polled_often(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, POLL_S=0.002)


Tensors = dict[str, np.ndarray[Any, Any]]


class Trained:
    """Tensors of two spans and an odd number of bytes, of which a step changes some."""

    def __init__(self) -> None:
        self.tensors: Tensors = {
            "words": np.zeros(SPAN_ELEMENTS + 1000, np.float16),
            "rest": np.zeros(3, np.uint8),
        }
        self._random = np.random.default_rng(0)

    def step(self, changed: float) -> Tensors:
        """Change a share of the values, the last byte among them; return the tensors."""
        words = self.tensors["words"].view(np.uint16)
        places = self._random.random(len(words)) < changed
        words[places] += self._random.integers(1, 2**16, places.sum(), np.uint16)
        self.tensors["rest"][-1] += 1
        return self.tensors


class Sampler:
    """A subscriber with a model whose tensors are views of the version that its mirror has read."""

    def __init__(self, subscriber: WeightSubscriber) -> None:
        self.subscriber = subscriber
        self._model = nn.Module()
        for name, tensor in Trained().tensors.items():
            self._model.register_buffer(name, torch.from_numpy(tensor))
        subscriber.attach(self._model)

    @property
    def tensors(self) -> Tensors:
        return {name: tensor.numpy() for name, tensor in self._model.state_dict().items()}

    async def newer(self, than: int) -> int:
        """Load a version above `than`."""
        await self.subscriber.newer(than=than)
        return await anyio.to_thread.run_sync(self.subscriber.refresh)


@asynccontextmanager
async def sampler_of(publisher: WeightFolder) -> AsyncIterator[Sampler]:
    async with WeightSubscriber(publisher.url) as subscriber:
        yield Sampler(subscriber)


@asynccontextmanager
async def opened(folder: Path, trained: Trained) -> AsyncIterator[tuple[WeightFolder, Sampler]]:
    async with WeightFolder(folder, trained.tensors) as publisher, sampler_of(publisher) as sampler:
        yield publisher, sampler


async def published(publisher: WeightFolder, tensors: Tensors, version: int) -> None:
    await publisher.publish(tensors, version)
    await publisher.written()


@asynccontextmanager
async def mirror_at_version_1(publisher: WeightFolder, sampler: Sampler, trained: Trained) -> AsyncIterator[None]:
    """Publish versions 0 and 1; the mirror reads no further one within the body, for the sampler uses version 0."""
    await published(publisher, trained.step(1), 0)
    await sampler.subscriber.newer()
    async with sampler.subscriber.sampling():
        assert await sampler.newer(than=-1) == 0
        await published(publisher, trained.step(0.02), 1)
        await sampler.subscriber.newer()
        yield


def path(folder: Path, version: int, name: str) -> Path:
    return folder / f"step-{version:08d}" / name


def same(first: Tensors, second: Tensors) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in ("words", "rest"))


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def damages(logs: list[Any]) -> list[str]:
    return [each["reason"] for each in logs if each["event"] == "weight_changes_damaged"]


# -- changes -----------------------------------------------------------------------------------------------------------


async def test_of_a_version_whose_predecessor_is_here_only_the_changes_are_read(tmp_path: Path) -> None:
    trained = Trained()

    async with opened(tmp_path, trained) as (publisher, sampler):
        async with mirror_at_version_1(publisher, sampler, trained):
            await published(publisher, trained.step(0.02), 2)
            emptied(path(tmp_path, 2, WHOLE))
        assert await sampler.newer(than=1) == 2

    assert same(sampler.tensors, trained.tensors)
    assert path(tmp_path, 2, CHANGES).stat().st_size < 0.05 * trained.tensors["words"].nbytes


@pytest.mark.parametrize(
    "shares", [(0.02, 0.02, 0.0, 0.3, 0.0001), (0.02, 1.0, 0.02, 0.39, 0.41)], ids=["few", "few and many"]
)
async def test_versions_that_are_read_as_changes_have_the_bytes_of_the_whole_ones(
    tmp_path: Path, shares: tuple[float, ...]
) -> None:
    trained = Trained()

    async with opened(tmp_path, trained) as (publisher, sampler):
        for version, share in enumerate((1.0, *shares)):
            await published(publisher, trained.step(share), version)
            assert await sampler.newer(than=version - 1) == version
            assert same(sampler.tensors, trained.tensors)
            assert same(sampler.tensors, load_file(path(tmp_path, version, WHOLE)))
        async with sampler_of(publisher) as joiner:
            assert await joiner.newer(than=-1) == len(shares)
            assert same(joiner.tensors, trained.tensors)


async def test_a_span_of_which_much_changed_is_read_from_the_whole_version_and_the_others_as_changes(
    tmp_path: Path,
) -> None:
    trained = Trained()

    async with opened(tmp_path, trained) as (publisher, sampler):
        async with mirror_at_version_1(publisher, sampler, trained):
            trained.tensors["words"].view(np.uint16)[SPAN_ELEMENTS:] += 1
            await published(publisher, trained.step(0.0), 2)
            changed_early(path(tmp_path, 2, WHOLE))
        assert await sampler.newer(than=1) == 2

    assert same(sampler.tensors, trained.tensors)
    assert path(tmp_path, 2, CHANGES).stat().st_size < 1000


async def test_a_version_of_which_much_changed_has_no_changes(tmp_path: Path) -> None:
    trained = Trained()

    async with opened(tmp_path, trained) as (publisher, sampler):
        for version in range(3):
            await published(publisher, trained.step(1), version)
            assert await sampler.newer(than=version - 1) == version

    assert same(sampler.tensors, trained.tensors)
    assert not path(tmp_path, 2, CHANGES).exists()


async def test_a_host_that_missed_a_version_and_one_that_joins_read_the_whole_one(tmp_path: Path) -> None:
    trained = Trained()

    with capture_logs() as logs:
        async with opened(tmp_path, trained) as (publisher, sampler):
            async with mirror_at_version_1(publisher, sampler, trained):
                for version in (2, 3, 4):  # when 4 is written, 2 is removed
                    await published(publisher, trained.step(0.02), version)
                    emptied(path(tmp_path, version, CHANGES))
            assert await sampler.newer(than=1) == 4
            assert same(sampler.tensors, trained.tensors)
        async with sampler_of(publisher) as joiner:
            assert await joiner.newer(than=-1) == 4
            assert same(joiner.tensors, trained.tensors)

    assert damages(logs) == []


# -- damage ------------------------------------------------------------------------------------------------------------


def torn(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def altered(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-9, os.SEEK_END)
        opened.write(b"\x55\xaa")


def changed_early(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(2**20)
        opened.write(bytes(range(256)))


def of_another_version(file: Path) -> None:
    shutil.copyfile(path(file.parent.parent, 1, CHANGES), file)


def forged(spans: Callable[[list[list[Any]]], object]) -> Callable[[Path], None]:
    """Return what changes the description of the spans, without a checksum."""

    def forge(file: Path) -> None:
        described = msgspec.json.decode(file.read_bytes())
        del described["checksum"]
        spans(described["spans"])
        file.write_bytes(msgspec.json.encode(described))

    return forge


DAMAGE: list[Any] = [
    pytest.param(CHANGES, torn, r"span 1: expected a delta of \d+ bytes, got \d+: it is torn", id="torn"),
    pytest.param(CHANGES, emptied, r"span 0: expected a delta of \d+ bytes, got 0: it is torn", id="empty"),
    pytest.param(CHANGES, altered, r"span 1: expected ", id="altered"),
    pytest.param(CHANGES, Path.unlink, r"No such file or directory", id="absent"),
    pytest.param(CHANGES, of_another_version, r"span 0: expected ", id="of another version"),
    pytest.param(VERSION, forged(list.pop), "expected 2 spans, got 1: it was altered", id="too few spans"),
    pytest.param(
        VERSION,
        forged(lambda spans: spans[0].__setitem__(0, 2**40)),
        f"span 0: expected a delta of at most \\d+ bytes, got {2**40}",
        id="too long",
    ),
    pytest.param(
        VERSION, forged(lambda spans: spans[0].__setitem__(0, -1)), "at most \\d+ bytes, got -1", id="negative"
    ),
    pytest.param(
        VERSION,
        forged(lambda spans: spans[1].__setitem__(1, "0" * 32)),
        "span 1: expected xxh3 0{32}, got \\w{32}: it was altered",
        id="another hash",
    ),
]


@pytest.mark.parametrize(("name", "harm", "reason"), DAMAGE)
async def test_damaged_changes_are_logged_once_and_the_whole_version_is_read(
    tmp_path: Path, name: str, harm: Callable[[Path], None], reason: str
) -> None:
    trained = Trained()

    with capture_logs() as logs:
        async with opened(tmp_path, trained) as (publisher, sampler):
            async with mirror_at_version_1(publisher, sampler, trained):
                await published(publisher, trained.step(0.02), 2)
                harm(path(tmp_path, 2, name))
            assert await sampler.newer(than=1) == 2
            assert same(sampler.tensors, trained.tensors)
            await published(publisher, trained.step(0.02), 3)
            assert await sampler.newer(than=2) == 3
            assert same(sampler.tensors, trained.tensors)

    (logged,) = damages(logs)
    assert re.search(reason, logged)


async def test_a_version_of_which_the_changes_and_the_whole_are_damaged_is_refused(tmp_path: Path) -> None:
    trained = Trained()

    async with opened(tmp_path, trained) as (publisher, sampler):
        async with mirror_at_version_1(publisher, sampler, trained):
            await published(publisher, trained.step(0.02), 2)
            emptied(path(tmp_path, 2, CHANGES))
            changed_early(path(tmp_path, 2, WHOLE))
        with pytest.raises(WeightsDamaged, match=r"weights\.safetensors: expected xxh3 \w+, got \w+: it was altered"):
            await sampler.newer(than=1)
