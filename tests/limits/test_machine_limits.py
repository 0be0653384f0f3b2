"""A resource that the machine lacks is an error at the start that names the remedy: never a SIGBUS, never a hang.

Each case is a process of its own, for limits cannot be raised again.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.cells import cells
from tests.namespaces import small_disk

RUN = """
import os, resource
{before}
import anyio
from penstock import TrajectoryGroup
from penstock.channels import connect, serve
from penstock.testing import group

async def main():
    async with serve("shm://", TrajectoryGroup, capacity_bytes={capacity_bytes}) as inbox:
        {within}
        try:
            async with connect(inbox.url, TrajectoryGroup, name="the sender") as outbox:
                sent = [group(instance_id=str(n), seed=n) for n in range(20)]
                for record in sent:
                    await outbox.send(record)
                    got = await inbox.receive()
                    assert {{n: c.tobytes() for n, c in got.columns().items()}} == {{
                        n: c.tobytes() for n, c in record.columns().items()
                    }}
                    del got
                print("arrived", len(sent))
        except Exception as error:
            print(type(error).__name__, error)

anyio.run(main)
"""

NO_MEMFD = "del os.memfd_create"
NO_DEV_SHM = """
        opens = os.open
        def refused(path, *arguments, **options):
            if str(path).startswith("/dev/shm"):
                raise PermissionError(13, "Permission denied")
            return opens(path, *arguments, **options)
        os.open = refused
"""
NO_ROOM_ON_DISK = "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))"
NO_ADDRESSES = (
    "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
    "resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))"
)


def run(*, before: str = "", within: str = "", capacity_bytes: int = 2**22, prefix: Sequence[str] = ()) -> str:
    script = RUN.format(before=before, within=within or "pass", capacity_bytes=capacity_bytes)
    ran = subprocess.run(
        [*prefix, sys.executable, "-c", script],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # else every thread reserves as many addresses as a segment has
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_without_memfd_records_travel_through_a_file_that_has_no_name() -> None:
    assert "arrived 20" in run(before=NO_MEMFD)


@pytest.mark.long
def test_without_memfd_and_dev_shm_a_channel_is_an_error() -> None:
    printed = run(before=NO_MEMFD, within=NO_DEV_SHM)
    assert printed.startswith("OutOfSharedMemory expected a memfd or a file in /dev/shm, got neither")
    assert "allow memfd_create in this sandbox, or mount a tmpfs there" in printed


@pytest.mark.parametrize("before", cells(["", NO_MEMFD], run=[""]), ids=["memfd", "no memfd"])
def test_memory_that_cannot_be_had_is_an_error_before_anything_is_sent(before: str) -> None:
    printed = run(before=before, within=NO_ROOM_ON_DISK)
    assert printed.startswith("OutOfSharedMemory expected 4")
    assert "bytes of shared memory for 4096 slots of 1024 bytes, got none (File too large" in printed
    assert ("as this kernel has no memfd" in printed) == bool(before)
    assert "lower capacity_bytes or the number of senders" in printed


@pytest.fixture(scope="module")
def small_shm() -> Sequence[str]:
    """Return the prefix of a command for which /dev/shm has a size of 1 MiB."""
    return small_disk(Path("/dev/shm"), "1m")  # noqa: S108 (covered by a file system of its own)


def test_a_dev_shm_of_1_mib_is_an_error_for_a_larger_segment_and_enough_for_a_smaller_one(
    small_shm: Sequence[str],
) -> None:
    printed = run(before=NO_MEMFD, prefix=small_shm)
    assert printed.startswith("OutOfSharedMemory expected 4")
    assert "got none (No space left on device" in printed
    assert "lower capacity_bytes or the number of senders" in printed

    assert "arrived 20" in run(before=NO_MEMFD, prefix=small_shm, capacity_bytes=2**18)


@pytest.mark.long
def test_memfds_need_nothing_of_dev_shm(small_shm: Sequence[str]) -> None:
    assert "arrived 20" in run(prefix=small_shm)


def test_a_segment_that_does_not_fit_the_address_space_is_an_error_at_the_start() -> None:
    printed = run(within=NO_ADDRESSES, capacity_bytes=2**28)
    assert printed.startswith("OutOfSharedMemory expected room for 276")
    assert "in this process' address space, got none" in printed
    assert "ulimit -v" in printed


def test_a_receiver_that_cannot_map_a_segment_sends_the_reason() -> None:
    """The sender's own mapping fits twice over; the receiver's, the third of this size, does not."""
    within = NO_ADDRESSES.replace("2**27", "3 * 2**26")
    printed = run(within=within, capacity_bytes=2**27)
    assert printed.startswith("OutOfSharedMemory the receiver rejected this sender: expected room for 138")


WORKERS = """
import resource, sys
import anyio
from penstock import processes, source
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Judge, SampleForever

sources, judges, limit = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
flow = source(SampleForever(), on=processes(sources)).then(Judge(), on=processes(judges))
pipeline = flow.sink(Commit(enough=20))
try:
    anyio.run(pipeline.run)
    print(pipeline.report.stop_reason)
except OSError as error:
    print(type(error).__name__, error, pipeline.report.stop_reason, sep="; ")
print(sum(worker.pid is not None for stage in pipeline.statistics().stages for worker in stage.workers))
"""


@pytest.mark.parametrize(
    ("sources", "judges", "limit", "message"),
    [
        pytest.param(1, 1, 64, "Commit returned", marks=pytest.mark.long),  # they are enough
        pytest.param(
            1, 1, 42, "expected 16 more file descriptors for the workers of Judge (1), got ", marks=pytest.mark.long
        ),
        (16, 1, 64, "expected 85 more file descriptors for the workers of SampleForever (16), got "),
        pytest.param(
            2, 4, 64, "expected 49 more file descriptors for the workers of Judge (4), got ", marks=pytest.mark.long
        ),
    ],
)
def test_workers_for_whom_the_limit_of_open_files_is_too_low_are_an_error_before_one_is_started(
    sources: int, judges: int, limit: int, message: str
) -> None:
    command = [sys.executable, "-c", WORKERS, str(sources), str(judges), str(limit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)

    printed, started = ran.stdout.splitlines()
    assert message in printed
    if "expected" in message:
        assert re.search(r"; opening failed: OutOfFileDescriptors: expected ", printed)
        assert "raise the limit of open files (ulimit -n), or run fewer workers" in printed
        assert started == "0"


def test_this_machine_has_memfds() -> None:
    os.close(os.memfd_create("penstock"))
