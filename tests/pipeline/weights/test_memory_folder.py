"""Versions that servers of this host load as files, which are memory of the publisher."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file
from tests.processes.children import child, line
from torch import nn

from penstock.errors import InvalidConfig, OutOfSharedMemory, WeightsMismatch
from penstock.torch import MemoryFolder

LOAD = """
import sys
from safetensors.torch import load_file
print({name: tensor.flatten().tolist() for name, tensor in load_file(sys.argv[1]).items()})
"""


def tied(value: float = 0.0) -> nn.Sequential:
    token, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    nn.init.constant_(token.weight, value)
    head.weight = token.weight
    return nn.Sequential(token, head)


def file_of(folder: MemoryFolder) -> Path:
    return Path(folder.url.removeprefix("file://")) / "weights.safetensors"


def versions_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def value_in(file: Path) -> float:
    """Return the one value of the tensor in a file."""
    weight = load_file(file)["0.weight"]
    assert (weight == weight[0, 0]).all()
    return weight[0, 0].item()


async def test_another_process_loads_each_version_as_a_file(tmp_path: Path) -> None:
    async with MemoryFolder(tmp_path, tied()) as folder:
        for version in range(4):
            await folder.publish(tied(version).state_dict(), version)
            loaded = await anyio.run_process([sys.executable, "-c", LOAD, str(file_of(folder))])
            assert loaded.stdout.decode().strip() == str({"0.weight": [float(version)] * 20})
            assert folder.version == version


async def test_a_version_is_written_to_no_disk(tmp_path: Path) -> None:
    async with MemoryFolder(tmp_path, tied()) as folder:
        await folder.publish(tied(1).state_dict(), 1)

        assert "memfd:" in str(file_of(folder).readlink().readlink())


async def test_the_version_before_stays_until_the_next_one(tmp_path: Path) -> None:
    async with MemoryFolder(tmp_path, tied()) as folder:
        await folder.publish(tied(1).state_dict(), 1)
        before = file_of(folder)
        await folder.publish(tied(2).state_dict(), 2)
        assert value_in(before) == 1
        await folder.publish(tied(3).state_dict(), 3)
        assert not before.exists()
        assert versions_in(tmp_path) == ["version-2", "version-3"]


async def test_dtypes_are_converted_where_asked_for(tmp_path: Path) -> None:
    async with MemoryFolder(tmp_path, tied(), cast={"float32": "bfloat16"}) as folder:
        await folder.publish(tied(1).state_dict(), 1)
        assert load_file(file_of(folder))["0.weight"].dtype == torch.bfloat16


async def test_other_tensors_and_older_versions_are_refused_and_the_newest_stays(tmp_path: Path) -> None:
    async with MemoryFolder(tmp_path, tied()) as folder:
        await folder.publish(tied(1).state_dict(), 1)
        with pytest.raises(WeightsMismatch, match="weight"):
            await folder.publish({}, 2)
        with pytest.raises(InvalidConfig, match="expected one above 1, got 1"):
            await folder.publish(tied(2).state_dict(), 1)
        assert value_in(file_of(folder)) == 1


async def test_a_host_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock._pipeline.channels.shared_memory.available_bytes", lambda: 100)
    async with MemoryFolder(tmp_path, tied()) as folder:
        with pytest.raises(OutOfSharedMemory, match="publish a smaller model"):
            await folder.publish(tied(1).state_dict(), 1)
        assert versions_in(tmp_path) == []


PUBLISHER = """
    import sys, anyio
    from torch import nn
    from penstock.torch import MemoryFolder

    async def main():
        model = nn.Linear(2, 2)
        async with MemoryFolder(sys.argv[1], model) as folder:
            await folder.publish(model.state_dict(), 1)
            print(folder.url, flush=True)
            await anyio.sleep_forever()

    anyio.run(main)
"""


async def test_a_killed_publisher_leaves_no_memory_and_the_next_one_removes_its_links(tmp_path: Path) -> None:
    with child(PUBLISHER, str(tmp_path)) as process:
        left = Path((await line(process)).removeprefix("file://")) / "weights.safetensors"
        assert load_file(left)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert left.is_symlink()
    assert not left.exists()

    async with MemoryFolder(tmp_path, tied()):
        assert not left.is_symlink()
