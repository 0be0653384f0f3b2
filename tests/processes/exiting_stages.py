"""Stages and environments for workers, whose code raises what would end a task or a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NoReturn

from penstock import ReceiveChannel, SendChannel, TrajectoryGroup

EXITS: dict[str, type[BaseException]] = {
    error.__name__: error
    for error in (RuntimeError, asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit)
}


@dataclass(frozen=True)
class Exits:
    """An environment, a source and a stage that raise."""

    name: str

    def __call__(self) -> Exits:
        return self

    async def rollout(self, task: int, repetition: int) -> NoReturn:  # noqa: ARG002 (the protocol's)
        raise EXITS[self.name]("in a worker")


@dataclass(frozen=True)
class ExitsAsSource(Exits):
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002 (the protocol's)
        raise EXITS[self.name]("in a worker")


@dataclass(frozen=True)
class ExitsAsStage(Exits):
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrajectoryGroup]) -> None:  # noqa: ARG002 (the protocol's)
        await inbox.receive()
        raise EXITS[self.name]("in a worker")
