"""A short soak, and tests of its detection of growth and duplicates."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from benchmarks.soak import Once, Sample, grown
from tests.faults.zygote import ROOT, environment
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Judge, SampleForever

from penstock import processes, source

FLAT = Sample(own_mb=30, shared_mb=5, descriptors=60, threads=4, mappings=350, children=5, sockets=3)


@pytest.mark.long
def test_workers_are_killed_and_stopped_at_random_and_nothing_is_lost_silently_or_grows(tmp_path: Path) -> None:
    results = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.5", "--seed", "2", "--json", str(results)]

    ran = subprocess.run(command, env=environment(), cwd=ROOT, check=False, capture_output=True, text=True)

    assert not ran.returncode, ran.stdout + ran.stderr
    assert json.loads(results.read_text())["faults"]


def test_a_constant_is_not_growth() -> None:
    assert not grown([FLAT] * 40)


def test_a_few_seconds_are_too_short_to_detect_growth() -> None:
    samples = [msgspec.structs.replace(FLAT, descriptors=10 * second) for second in range(3)]

    assert not grown(samples)
    assert not grown([])


@pytest.mark.parametrize("name", Sample.__struct_fields__)
def test_growth_is_detected(name: str) -> None:
    samples = [msgspec.structs.replace(FLAT, **{name: 10 * minute}) for minute in range(60)]

    assert [each.partition(" ")[0] for each in grown(samples)] == [name]


def test_a_duplicate_record_is_detected() -> None:
    once = Once()

    assert [once.take(number) for number in [0, 3, 1, 3, 2, 1, 4, 0]] == [
        True,
        True,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert not once.missing


async def test_a_run_that_has_ended_holds_no_segments_of_its_workers() -> None:
    flow = source(SampleForever(), on=processes(1)).then(Judge(), on=processes(1), capacity=2)
    pipeline = flow.sink(Commit(enough=20))

    await pipeline.run()

    gc.collect()
    assert "memfd:penstock" not in _open_files()


def _open_files() -> str:
    links = Path("/proc/self/fd").iterdir()
    return "\n".join(str(link.readlink()) for link in links if link.is_symlink())
