"""Weights over tcp, whole and as deltas, beside shared memory and a TCP copy: time until another process has them.

    python -m benchmarks.weights --megabytes 64 512
    python -m benchmarks.weights --megabytes 512 --changed 0.02

The publisher is this process, the sampler a process of its own, both on this machine: over tcp it takes itself for
another host. The times begin when `publish` is called, and end when the sampler's model has the version, as views. The
TCP copy sends as many bytes over loopback into a buffer that is reused, without a key and without hashes.

Over tcp, whole versions, of which every value changed, and versions of which `--changed` did take turns in one run.
Then whole ones go over a trusted link, whose ends prove their key and encrypt nothing. The sampler answers with the
hash of its model. Processor times are those of both processes in the same interval, the copy of `publish` included.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import anyio.to_thread
import torch
import xxhash
from rich.console import Console
from torch import nn

from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

from .contestants import leaving_nothing
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

ROW = 2**19
"""Elements of a row: 1 MiB."""

PART_BYTES = 2**20

WARM_UP = 3
"""Versions before those that are measured: the first two of each process write to memory that no process has used."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one version, from `publish` until the sampler has it."""

    s: float
    processor_s: float
    """Of the publisher's and the sampler's process."""
    sent_bytes: int
    """Over tcp, to the sampler."""


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
    """Answer each version with the time at which the model has it, the processor time so far, and the model's hash."""
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
            pipe.send((took, processor_s, found, time.process_time()))


class Versions:
    """Publishes versions to one sampler, one after the other."""

    def __init__(self, publisher: WeightPublisher, pipe: Connection, megabytes: int) -> None:
        self._publisher = publisher
        self._pipe = pipe
        self._weight = module(megabytes).get_parameter("weight")
        self._words = self._weight.view(torch.int16).view(-1)
        self._random = torch.Generator().manual_seed(0)
        self._sampler_s = 0.0
        """Processor time of the sampler before the next version."""

    async def publish(self, changed: float) -> Cost:
        """Change a share of the values, publish them, and return the cost.

        Raises:
            AssertionError: the sampler has other weights.
        """
        await anyio.to_thread.run_sync(self._change, changed)
        before_bytes, before_s, began = _sent_bytes(), time.process_time(), time.monotonic()
        await self._publisher.publish({"weight": self._weight}, self._publisher.version + 1)
        took, sampler_s, found, after_s = await anyio.to_thread.run_sync(self._pipe.recv)
        processor_s = time.process_time() - before_s + sampler_s - self._sampler_s
        self._sampler_s = after_s
        if found != digest(self._weight):
            raise AssertionError(f"expected version {self._publisher.version}, got other weights")
        return Cost(took - began, processor_s, _sent_bytes() - before_bytes)

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


async def published(
    megabytes: int, repeats: int, shares: tuple[float, ...], *, tcp: bool, trusted_link: bool = False
) -> list[list[Cost]]:
    """Return the costs of `repeats` versions for each share of the values that changed; the shares take turns."""
    async with (
        WeightPublisher(module(megabytes)) as publisher,
        publisher.serve("tcp://127.0.0.1:0", trusted_link=trusted_link) as address,
    ):
        where = replace(address, host="another") if tcp else publisher.url
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
            measured = partial(published, megabytes, arguments.repeats)
            whole, deltas = anyio.run(partial(measured, (1.0, arguments.changed), tcp=True))
            (trusted,) = anyio.run(partial(measured, (1.0,), tcp=True, trusted_link=True))
            (shared,) = anyio.run(partial(measured, (1.0,), tcp=False))
            results[str(megabytes)] = {
                "tcp": whole,
                f"tcp, {arguments.changed:.2%} changed": deltas,
                "tcp, trusted link": trusted,
                "shared memory": shared,
                "plain TCP copy": [Cost(s, 0.0, 0) for s in copied(megabytes, arguments.repeats)],
            }
            _show_ratios(megabytes, whole, deltas)
    _show(results)
    costs = {
        size: {way: [asdict(each) for each in found] for way, found in ways.items()} for size, ways in results.items()
    }
    write_json(arguments.json, {"weights": costs})


def _show_ratios(megabytes: int, whole: list[Cost], deltas: list[Cost]) -> None:
    """Print the costs of deltas as shares of those of whole versions, medians of the same run."""
    ratios = {
        name: median(getattr(each, name) for each in deltas) / median(getattr(each, name) for each in whole)
        for name in ("sent_bytes", "s", "processor_s")
    }
    print(f"{megabytes} MiB, deltas / whole versions: " + ", ".join(f"{name} {x:.3f}" for name, x in ratios.items()))


def _show(results: dict[str, Any]) -> None:
    rows = [
        [
            f"{way}, {size} MiB",
            median_of([each.s for each in costs], 3),
            median_of([int(size) / each.s for each in costs]),
            median_of([each.processor_s for each in costs], 3),
            median_of([each.sent_bytes / 2**20 for each in costs], 1),
        ]
        for size, ways in results.items()
        for way, costs in ways.items()
    ]
    print_table(
        Console(width=140), "Until another process has a version", ["", "s", "MiB/s", "processor s", "MiB sent"], rows
    )


if __name__ == "__main__":
    main()
