"""A report as text, and for rich."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
from rich.console import Console
from tests.pipeline.flow_stages import DropOdd, Groups, Pack, Train

from penstock import Report, processes, source
from penstock.accounting import Balance, PipelineStatistics, StageStatistics, WorkerStatistics


def report(**changes: object) -> Report:
    made = Report(
        stop_reason="stopped by SIGTERM",
        seconds=3.25,
        balance=Balance(0, 0, {}, {}),
        in_flight=0,
        statistics=PipelineStatistics(stages=(), edges=()),
    )
    return msgspec.structs.replace(made, **changes)


async def test_a_printed_report_is_a_table_of_the_result_the_trajectories_and_the_stages() -> None:
    ran = await source(Groups(4)).then(DropOdd()).then(Pack()).sink(Train()).run()

    rows = [line.split() for line in str(msgspec.structs.replace(ran, seconds=1234.5)).splitlines()]

    assert rows[:5] == [
        ["ended", "end", "of", "stream"],
        ["seconds", "1,234.5"],
        ["steps", "2"],
        ["checkpoint", "none"],
        ["to", "resume", "not", "possible:", "the", "next", "run", "starts", "from", "the", "beginning"],
    ]
    assert ["begun", "8"] in rows
    assert ["trained", "4"] in rows
    assert ["filtered", "4", "4", "odd"] in rows
    assert next(row for row in rows if row[:1] == ["DropOdd"])[:3] == ["DropOdd", "here", "returned"]


def test_a_run_in_a_folder_is_resumed_by_its_script(tmp_path: Path) -> None:
    text = str(report(folder=str(tmp_path), checkpoint=f"{tmp_path}/checkpoints/step-00000003"))

    joined = "".join(line.strip() for line in text.splitlines())
    assert f"{tmp_path}/checkpoints/step-00000003" in joined
    assert "start the script again: it continues from the newest checkpoint in" in text


def test_a_run_that_wrote_a_checkpoint_elsewhere_is_resumed_by_its_trainer() -> None:
    assert report(checkpoint="kept/step-00000003").to_resume == (
        "call trainer.resume('kept/step-00000003') before the run"
    )


def test_many_reasons_are_counted_and_the_most_frequent_are_listed() -> None:
    reasons = {"failed": {"a": 1, "b": 4, "c": 2, "d": 3}}

    assert "4 b, 3 d, 2 c, 1 more" in str(report(balance=Balance(10, 0, {"failed": 10}, reasons)))


def test_the_restarts_that_happened_are_apart_from_those_that_are_allowed() -> None:
    stage = StageStatistics(
        name="SourceEnv",
        placement=str(processes(2)),
        state="returned",
        waiting_for="",
        waited_for_records_s=0.0,
        waited_for_credit_s=0.0,
        dropped={},
        workers=tuple(
            WorkerStatistics(name=f"SourceEnv {number}/2", pid=number, state="finished", restarts=number - 1)
            for number in (1, 2)
        ),
    )

    text = str(report(statistics=PipelineStatistics(stages=(stage,), edges=())))

    assert "2 processes, at most 1 restart an hour each; 1 restarted" in text


def test_rich_prints_it_with_styles_and_str_without() -> None:
    console = Console(file=io.StringIO(), color_system="standard", force_terminal=True, width=100)
    with console.capture() as printed:
        console.print(report())

    assert "\x1b[" in printed.get()
    assert "\x1b[" not in str(report())


def test_the_repr_is_that_of_a_value() -> None:
    assert repr(report()).startswith("Report(stop_reason='stopped by SIGTERM', seconds=3.25, ")
