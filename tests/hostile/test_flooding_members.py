"""A member that has joined floods a run in its own process, again and again: an honest one is trained to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest
from tests.hostile.members import member, numbered
from tests.hostile.test_fuzzed_members import Run, running
from tests.wire import Ending, Observations, WorkerReport

from penstock.channels import ChannelKey
from penstock.errors import PeerClosed, PeerLost

pytestmark = pytest.mark.anyio

GROUPS, FLOODS = 20, 5

MOST_GROWTH = 256 * 2**20
"""Bytes by which the process of the run may grow."""


def gauges(flood: int) -> WorkerReport:
    """Return a report with as many metrics as a worker may have, of other names in each flood."""
    return WorkerReport(Observations(gauges={f"{flood}/{n:05}" + "x" * 200: 0.0 for n in range(16_000)}), ())


def unknown_ends(_: int) -> WorkerReport:
    ends = [Ending(numbered(10_000 + n).id, (0, 1), "failed", f"reason {n}") for n in range(2000)]
    return WorkerReport(None, tuple(ends))


FLOODED: dict[str, tuple[Callable[[int], WorkerReport], int, int]] = {
    "telemetry": (lambda _: WorkerReport(Observations(totals={"x": 1.0}), ()), 20_000, 0),
    "empty reports": (lambda _: WorkerReport(None, ()), 20_000, 0),
    "many metrics": (gauges, 10, 0),
    "unknown ends": (unknown_ends, 500, FLOODS),
}
"""Returns the report of each flood; how often it is sent; how many floods are refused at least."""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The file of a key."""
    ChannelKey.create(tmp_path / "key")
    return tmp_path / "key"


def most_memory(run: Run) -> int:
    """Return the bytes of memory that the process of a run has had at most."""
    status = Path(f"/proc/{run.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


async def flood(run: Run, report: bytes, times: int) -> None:
    """Join and send a report as fast as possible, until the run has had enough."""
    with suppress(PeerClosed, PeerLost):
        async with member(run.url, run.key, name="flooding") as flooding:
            await flooding.join()
            for number in range(times):
                flooding.send(report)
                if number % 100 == 0:
                    await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("reported", "times", "refused"),
    [pytest.param(*FLOODED[kind], id=kind) for kind in FLOODED],
)
@pytest.mark.long
async def test_an_honest_worker_is_trained_to_its_end_beside_one_that_floods(
    reported: Callable[[int], WorkerReport], times: int, refused: int, key: Path
) -> None:
    sampled: list[int | None] = []
    async with running("assigned", key, groups=GROUPS) as run, member(run.url, run.key, name="honest") as honest:
        await honest.join()
        before = most_memory(run)
        for number in range(FLOODS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(flood, run, msgspec.msgpack.encode(reported(number)), times)
                sampled.append(await honest.sample())
        grown = most_memory(run) - before
        sampled += await honest.sample_all()

    assert sampled == list(range(GROUPS))
    assert sorted(map(int, run.result["trained"])) == sampled
    assert run.result["balanced"]
    assert run.result["in_flight"] == 0
    assert run.result["rejected"] >= refused
    assert grown < MOST_GROWTH
