"""A script that runs a pipeline of joined workers; it prints a line when it has trained a group."""

from __future__ import annotations

import sys

import anyio
from tests.processes.script_of_joined_workers import endless

from penstock import ReceiveChannel, TrajectoryGroup, current, joining, source


class Tell:
    """Trains everything, and tells of the first group."""

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        told = False
        async for group in inbox:
            current().ledger.end(group, "trained")
            if not told:
                sys.stdout.write("trained\n")
                sys.stdout.flush()
                told = True


if __name__ == "__main__":
    url, digest = sys.argv[1:]
    anyio.run(source(endless(), on=joining(expected=1, url=url, digest=digest)).sink(Tell()).run)
