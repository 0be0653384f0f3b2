"""Weights over tcp and through a folder, whole and as deltas, beside shared memory and a TCP copy.

    python -m benchmarks.weights --megabytes 64 512
    python -m benchmarks.weights --megabytes 512 --changed 0.02

The publisher is this process, the sampler a process of its own, both on this machine: over tcp it takes itself for
another host. The times begin when `publish` is called, and end when the sampler's model has the version, as views. The
TCP copy sends as many bytes over loopback into a buffer that is reused, without a key and without hashes.

Over tcp and through a folder, whole versions, of which every value changed, and versions of which `--changed` did take
turns in one run. The sampler answers with the hash of its model. Processor times are those of both processes in the
same interval, the copy of `publish` included. The trainer waits until `publish` returns; the version in a folder is
written meanwhile, and the sampler polls for it. The folder is one for temporary files.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import anyio
import anyio.to_thread
import torch
import xxhash
from rich.console import Console
from torch import nn

from penstock.torch import WeightFolder
from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

from .contestants import leaving_nothing
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

ROW = 2**19
"""Elements of a row: 1 MiB."""

PART_BYTES = 2**20

Way: TypeAlias = Literal["tcp", "tcp, trusted link", "folder", "shared memory"]

WAYS: tuple[Way, ...] = ("tcp", "folder")

WHOLE_WAYS: tuple[Way, ...] = ("tcp, trusted link", "shared memory")
"""Those that are measured with whole versions alone: the ends of the first prove their key and encrypt nothing."""
"""The ways that send changes."""

WARM_UP = 3
"""Versions before those that are measured: the first two of each process write to memory that no process has used."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one version, from `publish` until the sampler has it."""

    s: float
    processor_s: float
    """Of the publisher's and the sampler's process."""
    moved_bytes: int
    """Over tcp to the sampler, or read by it from a folder."""
    publish_s: float
    """Until `publish` returned: the trainer waits as long."""
    written_s: float
    """Until the version was in the folder; else as `publish_s`."""


def module(megabytes: int) -> nn.Module:
    """Return a module with one parameter of so many MiB, in bfloat16."""
    made = nn.Module()
    made.register_parameter(
        "weight", nn.Parameter(torch.zeros((megabytes, ROW), dtype=torch.bfloat16), requires_grad=False)
    )
    return made


def digest(tensor: torch.Tensor) -> str:
    """Return the hash of the bytes of a tensor."""
    return xxhash.xxh3_128_hexdigest(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


@contextmanager
def child(work: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `work` in a process of its own within the body; it gets the other end of the pipe and the arguments."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


# -- published weights -------------------------------------------------------------------------------------------------


def sample(pipe: Connection, address: str | WeightAddress, megabytes: int) -> None:
    """Answer each version with the time at which the model has it, its hash, and what this process has used so far."""
    anyio.run(_sample, pipe, address, megabytes)


async def _sample(pipe: Connection, address: str | WeightAddress, megabytes: int) -> None:
    model = module(megabytes)
    async with WeightSubscriber(address) as subscriber:
        subscriber.attach(model)
        pipe.send("attached")
        while True:
            await subscriber.newer()
            await anyio.to_thread.run_sync(subscriber.refresh)
            took, processor_s = time.monotonic(), time.process_time()
            found = await anyio.to_thread.run_sync(digest, model.get_parameter("weight"))
            pipe.send((took, processor_s, found, time.process_time(), _read_bytes()))


class Versions:
    """Publishes versions to one sampler, one after the other."""

    def __init__(self, publisher: WeightPublisher | WeightFolder, pipe: Connection, megabytes: int) -> None:
        self._publisher = publisher
        self._pipe = pipe
        self._weight = module(megabytes).get_parameter("weight")
        self._words = self._weight.view(torch.int16).view(-1)
        self._random = torch.Generator().manual_seed(0)
        self._sampler_s = 0.0
        """Processor time of the sampler before the next version."""
        self._sampler_bytes = 0
        """Bytes that the sampler had read from files before the next version."""

    async def publish(self, changed: float) -> Cost:
        """Change a share of the values, publish them, and return the cost.

        Raises:
            AssertionError: the sampler has other weights.
        """
        await anyio.to_thread.run_sync(self._change, changed)
        before_bytes, before_s, began = _sent_bytes(), time.process_time(), time.monotonic()
        await self._publisher.publish({"weight": self._weight}, self._publisher.version + 1)
        returned = written = time.monotonic()
        if isinstance(self._publisher, WeightFolder):
            await self._publisher.written()
            written = time.monotonic()
        took, sampler_s, found, after_s, read_bytes = await anyio.to_thread.run_sync(self._pipe.recv)
        processor_s = time.process_time() - before_s + sampler_s - self._sampler_s
        moved = _sent_bytes() - before_bytes
        if isinstance(self._publisher, WeightFolder):
            moved = read_bytes - self._sampler_bytes
        self._sampler_s, self._sampler_bytes = after_s, read_bytes
        if found != digest(self._weight):
            raise AssertionError(f"expected version {self._publisher.version}, got other weights")
        return Cost(took - began, processor_s, moved, returned - began, written - began)

    def _change(self, share: float) -> None:
        if share >= 1:
            self._words += 1
        else:
            count = int(share * len(self._words))
            self._words[torch.randint(len(self._words), (count,), generator=self._random)] += 1


def _sent_bytes() -> int:
    """Return the bytes that this machine has sent over loopback."""
    with Path("/proc/net/dev").open(encoding="ascii") as file:
        (loopback,) = (line.split() for line in file if line.lstrip().startswith("lo:"))
    return int(loopback[9])


def _read_bytes() -> int:
    """Return the bytes that this process has read from files."""
    with Path("/proc/self/io").open(encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))


@asynccontextmanager
async def _publisher(
    way: Way, megabytes: int
) -> AsyncIterator[tuple[WeightPublisher | WeightFolder, str | WeightAddress]]:
    """Yield a publisher, and where a sampler finds its versions."""
    if way == "folder":
        with tempfile.TemporaryDirectory() as folder:
            async with WeightFolder(folder, module(megabytes)) as versions:
                yield versions, versions.url
        return
    async with (
        WeightPublisher(module(megabytes)) as publisher,
        publisher.serve("tcp://127.0.0.1:0", trusted_link=way == "tcp, trusted link") as address,
    ):
        yield publisher, publisher.url if way == "shared memory" else replace(address, host="another")


async def published(way: Way, megabytes: int, repeats: int, shares: tuple[float, ...]) -> list[list[Cost]]:
    """Return the costs of `repeats` versions for each share of the values that changed; the shares take turns."""
    async with _publisher(way, megabytes) as (publisher, where):
        with child(sample, where, megabytes) as pipe:
            await anyio.to_thread.run_sync(pipe.recv)
            versions = Versions(publisher, pipe, megabytes)
            for _ in range(WARM_UP):
                await versions.publish(1.0)
            costs = [[await versions.publish(share) for share in shares] for _ in range(repeats)]
    return [list(each) for each in zip(*costs, strict=True)]


# -- a plain copy ------------------------------------------------------------------------------------------------------


def receive(pipe: Connection, megabytes: int) -> None:
    """Answer with the time at which all bytes of each copy have arrived."""
    buffer = memoryview(bytearray(megabytes * 2**20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        with listener.accept()[0] as connection:
            while True:
                received = 0
                while received < len(buffer):
                    received += connection.recv_into(buffer[received:])
                pipe.send(time.monotonic())


def copied(megabytes: int, repeats: int) -> list[float]:
    """Return the seconds of each copy over TCP."""
    content, times = memoryview(bytes(megabytes * 2**20)), []
    with child(receive, megabytes) as pipe, socket.create_connection(("127.0.0.1", pipe.recv())) as connection:
        for _ in range(repeats + 1):
            began = time.monotonic()
            for first in range(0, len(content), PART_BYTES):
                connection.sendall(content[first : first + PART_BYTES])
            times.append(pipe.recv() - began)
    return times[1:]


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, seconds=None, repeats=5)
    parser.add_argument("--megabytes", type=count, nargs="+", default=[64, 512], help="MiB of a version")
    parser.add_argument("--changed", type=float, default=0.02, help="share of the values that a version changes")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with leaving_nothing():
        for megabytes in arguments.megabytes:
            ways: dict[str, list[Cost]] = {}
            for way in WAYS:
                whole, deltas = anyio.run(published, way, megabytes, arguments.repeats, (1.0, arguments.changed))
                ways |= {way: whole, f"{way}, {arguments.changed:.2%} changed": deltas}
                _show_ratios(f"{way}, {megabytes} MiB", whole, deltas)
            for way in WHOLE_WAYS:
                (ways[way],) = anyio.run(published, way, megabytes, arguments.repeats, (1.0,))
            copies = [Cost(s, 0.0, 0, s, s) for s in copied(megabytes, arguments.repeats)]
            results[str(megabytes)] = ways | {"plain TCP copy": copies}
    _show(results)
    costs = {
        size: {way: [asdict(each) for each in found] for way, found in ways.items()} for size, ways in results.items()
    }
    write_json(arguments.json, {"weights": costs})


def _show_ratios(name: str, whole: list[Cost], deltas: list[Cost]) -> None:
    """Print the costs of deltas as shares of those of whole versions, medians of the same run.

    Also the time of `publish` as a share of the time until the version is written.
    """
    ratios = {
        cost: median(getattr(each, cost) for each in deltas) / median(getattr(each, cost) for each in whole)
        for cost in ("moved_bytes", "s", "processor_s")
    }
    print(f"{name}, deltas / whole versions: " + ", ".join(f"{cost} {x:.3f}" for cost, x in ratios.items()))
    shares = [median(each.publish_s / each.written_s for each in costs) for costs in (whole, deltas)]
    print(f"{name}, publish / written: {shares[0]:.3f}, with deltas {shares[1]:.3f}")


def _show(results: dict[str, Any]) -> None:
    rows = [
        [
            f"{way}, {size} MiB",
            median_of([each.s for each in costs], 3),
            median_of([int(size) / each.s for each in costs]),
            median_of([each.processor_s for each in costs], 3),
            median_of([each.moved_bytes / 2**20 for each in costs], 1),
            median_of([each.publish_s for each in costs], 3),
            median_of([each.written_s for each in costs], 3),
        ]
        for size, ways in results.items()
        for way, costs in ways.items()
    ]
    print_table(
        Console(width=140),
        "Until another process has a version",
        ["", "s", "MiB/s", "processor s", "MiB moved", "publish s", "written s"],
        rows,
    )


if __name__ == "__main__":
    main()
