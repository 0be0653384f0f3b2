"""Weights over tcp beside shared memory and a plain TCP copy: time until another process has a version.

    python -m benchmarks.weights --megabytes 64 512

The publisher is this process, the sampler a process of its own, both on this machine: over tcp it takes itself for
another host. The times begin when `publish` is called, and end when the sampler's model has the version, as views. The
TCP copy sends as many bytes over loopback into a buffer that is reused, without a key and without hashes.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import torch
from rich.console import Console
from torch import nn

from penstock.weights import WeightAddress, WeightPublisher, WeightSubscriber

from .contestants import leaving_nothing
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

ROW = 2**18
"""Elements of a row: 1 MiB."""

PART_BYTES = 2**20


def module(megabytes: int, value: float) -> nn.Module:
    """Return a module with one parameter of so many MiB."""
    made = nn.Module()
    made.register_parameter("weight", nn.Parameter(torch.full((megabytes, ROW), float(value)), requires_grad=False))
    return made


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
    """Answer each version with the time at which the model has it."""
    anyio.run(_sample, pipe, address, megabytes)


async def _sample(pipe: Connection, address: str | WeightAddress, megabytes: int) -> None:
    model = module(megabytes, 0)
    async with WeightSubscriber(address) as subscriber:
        subscriber.attach(model)
        pipe.send("attached")
        while True:
            await subscriber.newer()
            version = await anyio.to_thread.run_sync(subscriber.refresh)
            took = time.monotonic()
            weight = model.get_parameter("weight")
            if not (weight[0, 0] == weight[-1, -1] == version):
                raise AssertionError(f"expected version {version}, got another one")
            pipe.send(took)


async def published(megabytes: int, repeats: int, *, tcp: bool) -> list[float]:
    """Return the seconds from each `publish` until the sampler has the version."""
    model, times = module(megabytes, 0), []
    async with WeightPublisher(model) as publisher, publisher.serve("tcp://127.0.0.1:0") as address:
        where = replace(address, host="another") if tcp else publisher.url
        with child(sample, where, megabytes) as pipe:
            await anyio.to_thread.run_sync(pipe.recv)
            for version in range(1, repeats + 2):
                weights = {"weight": torch.full((megabytes, ROW), float(version))}
                began = time.monotonic()
                await publisher.publish(weights, version)
                times.append(await anyio.to_thread.run_sync(pipe.recv) - began)
    return times[1:]  # the first one writes to memory that no process has used


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
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with leaving_nothing():
        for megabytes in arguments.megabytes:
            results[str(megabytes)] = {
                "tcp": anyio.run(_published, megabytes, arguments.repeats, True),
                "shared memory": anyio.run(_published, megabytes, arguments.repeats, False),
                "plain TCP copy": copied(megabytes, arguments.repeats),
            }
    _show(results)
    write_json(arguments.json, {"weights": results})


async def _published(megabytes: int, repeats: int, tcp: bool) -> list[float]:  # noqa: FBT001 (see `main`)
    return await published(megabytes, repeats, tcp=tcp)


def _show(results: dict[str, Any]) -> None:
    rows = [
        [f"{way}, {size} MiB", median_of(seconds, 3), median_of([int(size) / each for each in seconds])]
        for size, ways in results.items()
        for way, seconds in ways.items()
    ]
    print_table(Console(width=100), "Until another process has a version", ["", "s", "MiB/s"], rows)


if __name__ == "__main__":
    main()
