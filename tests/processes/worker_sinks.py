"""Sinks that the tests of workers end their pipelines with, here in the parent."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from penstock import ReceiveChannel, TrajectoryGroup, current


@dataclass(frozen=True)
class Commit:
    """Trains on every group it receives; returns after `enough`."""

    received: list[str] = field(default_factory=list)
    enough: int | None = None

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            self.received.append(group.instance_id)
            current().ledger.end(group, "trained")
            if len(self.received) == self.enough:
                return


@dataclass(frozen=True)
class Attentive(Commit):
    """Sets an event at the first record."""

    began: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            current().ledger.end(group, "trained")
            del group  # its slot is free for the next one
            self.began.set()
