from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from penstock._pipeline.diagnosis.finding import RunFinding
from penstock._pipeline.view.memory_use import DeviceUse, MemoryUse
from penstock._pipeline.view.progress import Progress
from penstock._pipeline.view.snapshot import Snapshot, duration
from penstock._pipeline.view.table import table
from penstock.accounting import (
    Balance,
    EdgeStatistics,
    PipelineStatistics,
    StageStatistics,
    WorkerStatistics,
)
from penstock.channels import ChannelStatistics


def stage(name: str, waiting_for: str = "", workers: Sequence[WorkerStatistics] = ()) -> StageStatistics:
    return StageStatistics(
        name=name,
        placement=f"{len(workers)} processes, at most 1 restart an hour each" if workers else "here",
        state="running",
        waiting_for=waiting_for,
        waited_for_records_s=12.0,
        waited_for_credit_s=300.0,
        dropped={},
        workers=tuple(workers),
    )


def worker(number: int, restarts: int = 0) -> WorkerStatistics:
    return WorkerStatistics(name=f"SourceEnv {number}/2", pid=number, state="running", restarts=restarts)


CHANNEL = ChannelStatistics(
    transport="shm",
    capacity=64,
    items=16,
    capacity_bytes=None,
    nbytes=0,
    sent=100,
    received=84,
    senders=2,
    waiting_for="",
    waited_s=0.0,
)


def snapshot() -> Snapshot:
    progress = Progress(max_steps=250)
    for step in (1, 2):
        progress.note(
            {
                "reward": 0.25 * step,
                "accuracy": 0.875,
                "response_length/mean": 31.0,
                "perf/time_per_step": 2.0,
                "perf/total_num_tokens": 25_000.0,
                "batch/trajectories": 9.0,
            },
            step,
        )
    source = stage("SourceEnv", "credit from SinkTrainer", [worker(1), worker(2, restarts=1)])
    edge = EdgeStatistics(upstream="SourceEnv", downstream="SinkTrainer", trajectories=1234, channel=CHANNEL)
    return Snapshot(
        progress.state(),
        statistics=PipelineStatistics(stages=(source, stage("SinkTrainer")), edges=(edge,)),
        balance=Balance(96, 16, {"trained": 64, "filtered": 16, "lost": 0}, {}),
        memory=MemoryUse(800 * 2**20, 3 * 2**30, (DeviceUse(34 * 2**30, 80 * 2**30),)),
    )


def shown(width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table(snapshot()))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_table_shows_steps_metrics_stages_trajectories_and_memory() -> None:
    assert shown(120) == [
        "step 2/250   0 s, 8 min left   12,500 tokens/s   4.5 trajectories/s",
        "reward                0.5    ▁█",
        "accuracy              0.875  ▁▁",
        "response_length/mean  31     ▁▁",
        "stage        where                waits for                channel before   passed  records  credit",
        "SourceEnv    2 processes, 1 died  credit from SinkTrainer                              12 s   5 min",
        "SinkTrainer  here                 busy                     ━     16/64 shm   1,234     12 s   5 min",
        "trajectories  96 begun = 16 in flight + 64 trained + 16 filtered",
        "memory        800 MiB here, 3.0 GiB in 2 workers, GPU 0: 34.0/80.0 GiB",
    ]


def test_the_gravest_finding_has_a_row() -> None:
    finding = RunFinding(rule="learning_rate_zero", numbers="lr 0 in steps 1 to 5", causes=(), change=("a.lr=1",))
    console = Console(width=120, file=io.StringIO(), record=True)

    console.print(table(replace(snapshot(), finding=finding)))

    last = console.export_text().splitlines()[-1].rstrip()
    assert last == "finding       learning_rate_zero: lr 0 in steps 1 to 5; try a.lr=1"


def test_a_narrow_terminal_shortens_rows_and_wraps_none() -> None:
    rows = shown(60)

    assert len([row for row in rows if row.startswith(("So", "Si"))]) == 2
    assert max(map(len, rows)) <= 60


def test_a_terminal_of_80_columns_shows_what_each_stage_waits_for_and_the_channel_before_it() -> None:
    console = Console(file=io.StringIO(), width=80, record=True)
    stages = [stage("SourceEnv"), stage("AdvantageNormalizer", "records from RewardBridge")]
    edge = EdgeStatistics(upstream="a", downstream="b", trajectories=1_234_567, channel=CHANNEL)
    console.print(table(replace(snapshot(), statistics=PipelineStatistics(stages=tuple(stages), edges=(edge,)))))

    rows = console.export_text().splitlines()
    (header,) = [row for row in rows if row.startswith("stage")]
    (row,) = [row for row in rows if row.startswith("AdvantageNormalizer")]
    assert header.split() == ["stage", "where", "waits", "for", "channel", "before", "passed"]
    assert "records from Reward" in row
    assert row.endswith("16/64 shm  1,234,567")


def test_times_have_the_unit_that_suits_them() -> None:
    assert [duration(seconds) for seconds in (34.4, 119, 600, 12_240)] == ["34 s", "119 s", "10 min", "3.4 h"]
