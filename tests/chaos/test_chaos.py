"""A short chaos run, and tests of its checks."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chaos.actors import Found
from chaos.processes import children_of
from chaos.records import CorruptRecord, check_batch, check_record, every_id, record_of
from chaos.rounds import SCENARIOS, judge
from tests.failsafe import FAILSAFE_S
from tests.faults.zygote import ROOT, environment

from penstock import GroupId, TrainBatch

COMMAND = [sys.executable, "-m", "chaos", "--minutes", "0"]

IDS = every_id(lanes=2, count=3)

WELL = Found(stop_reason="end of stream", balanced=True, in_flight=0, lost={})

DIED = {"Check 1/1 (pid 7) was killed by SIGKILL": 2}


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_with_random_kills_stops_cuts_flips_and_floods_nothing_is_lost_doubled_hung_or_left_over(scenario: str) -> None:
    command = [*COMMAND, "--only", scenario, "--seed", "3", "--round-s", "2"]

    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("0 lost, 0 doubled, 0 hung, 0 ended, 0 left over, 0 others\n")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for those of sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def descendants(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [each for child in children for each in descendants(child)]


def test_a_driver_that_is_killed_leaves_nothing(folder: Path) -> None:
    variables = environment() | {"TMPDIR": str(folder)}
    command = [*COMMAND, "--only", "workers", "--round-s", "1000"]
    with subprocess.Popen(command, cwd=ROOT, env=variables) as driver, ExitStack() as opened:
        while len(descendants(driver.pid)) < 2:  # a trainer and a worker; it kills them as fast as they start
            assert driver.poll() is None
            time.sleep(0.05)
        pidfds = list(map(partial(open_pidfd, opened), descendants(driver.pid)))
        driver.kill()
        assert all(select.select([pidfd], [], [], FAILSAFE_S)[0] for pidfd in pidfds if pidfd is not None)

    deadline = time.monotonic() + FAILSAFE_S  # a worker that began meanwhile has still to end
    while left := list(folder.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def open_pidfd(opened: ExitStack, pid: int) -> int | None:
    """Open a process, which the driver may have killed already: that is what it does."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    opened.callback(os.close, pidfd)
    return pidfd


def test_a_correct_log_has_no_problems() -> None:
    assert judge(IDS, sorted(IDS), WELL, may_lose=False) == []
    assert judge(IDS, sorted(IDS)[1:], msgspec.structs.replace(WELL, lost=DIED), may_lose=True) == []


@pytest.mark.parametrize(
    ("trained", "found", "wrong"),
    [
        (sorted(IDS)[1:], WELL, "1 records are missing"),
        ([*sorted(IDS), min(IDS)], WELL, "was trained 2 times"),
        ([*sorted(IDS), GroupId("lane7", "0")], WELL, "was trained and never sent"),
        (sorted(IDS), None, "no report"),
        (sorted(IDS), msgspec.structs.replace(WELL, in_flight=1), "do not balance"),
        (sorted(IDS), msgspec.structs.replace(WELL, lost=DIED), "lost as"),
        (sorted(IDS), msgspec.structs.replace(WELL, stop_reason="Trainer returned"), "ended by"),
    ],
)
def test_lost_duplicate_and_unbalanced_records_are_detected(
    trained: list[GroupId], found: Found | None, wrong: str
) -> None:
    assert wrong in judge(IDS, trained, found, may_lose=False)[0]


def test_a_missing_record_without_a_death_is_detected_in_workers_too() -> None:
    assert "are missing" in judge(IDS, sorted(IDS)[2:], msgspec.structs.replace(WELL, lost=DIED), may_lose=True)[0]


@pytest.mark.parametrize("name", record_of(1, 2).columns())
def test_a_flipped_bit_would_be_seen_in_every_column(name: str) -> None:
    column = record_of(1, 2).columns()[name].copy()
    column.view(np.uint8)[-1] ^= 1

    with pytest.raises(CorruptRecord, match=name):
        check_record(msgspec.structs.replace(record_of(1, 2), **{name: column}))


def test_a_batch_whose_tokens_are_those_of_another_record_would_be_seen() -> None:
    batch = TrainBatch.pack([record_of(0, 1), record_of(1, 2)])
    check_batch(batch)

    with pytest.raises(CorruptRecord, match="tokens"):
        check_batch(msgspec.structs.replace(batch, tokens=batch.tokens[::-1].copy()))
