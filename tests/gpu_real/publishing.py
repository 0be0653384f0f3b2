"""A publisher of weights in the memory of a GPU, in a process of its own: a version for each number that it reads."""

from __future__ import annotations

import sys

import anyio
import torch
from tests.gpu_real.versions import Model, tensors

from penstock.weights import WeightPublisher


async def main() -> None:
    device = torch.device("cuda:0")
    async with WeightPublisher(Model(device), device="cuda:0") as publisher:
        print(publisher.url, flush=True)  # noqa: T201 (read by the test)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            await publisher.publish(tensors(int(line), device), int(line))
            print("published", flush=True)  # noqa: T201


if __name__ == "__main__":
    anyio.run(main)
