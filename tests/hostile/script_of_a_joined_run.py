"""A run whose workers join, in a process of its own: `MODE URL KEY GROUPS`. Prints what it has trained and rejected."""

from __future__ import annotations

import json
import sys
from typing import Any

import anyio
import structlog
from tests.hostile.members import DIGEST, GROUP_SIZE
from tests.processes.script_of_joined_workers import Rollouts
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Sample

from penstock import SourceEnv, joining, source
from penstock.policies import NoOpPolicy

rejected: int = 0


def count_rejections(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Note how many were rejected in all, and print no event."""
    global rejected  # noqa: PLW0603 (printed at the end)
    rejected = max(rejected, event.get("rejected", 0))
    raise structlog.DropEvent


async def main(*arguments: str) -> None:
    """Run until the prompts are trained, or both shares of the work are done."""
    mode, url, key, groups = arguments
    structlog.configure(processors=[count_rejections])
    assigned = SourceEnv(Rollouts, NoOpPolicy(), group_size=GROUP_SIZE, groups=int(groups) or None, concurrency=8)
    sink = Commit()
    pipeline = source(
        assigned if mode == "assigned" else Sample(0), on=joining(expected=2, url=url, key=key, digest=DIGEST)
    ).sink(sink)
    await pipeline.run()
    assert pipeline.report is not None
    balance = pipeline.report.balance
    print(  # noqa: T201 (read by the test)
        json.dumps(
            {
                "trained": sink.received,
                "rejected": rejected,
                "admitted": balance.admitted,
                "in_flight": balance.in_flight,
                "ended": balance.ended,
                "balanced": balance.balanced,
            }
        )
    )


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
