from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import anyio
import pytest
from tests.loop_clock import LoopClock
from tests.pipeline.flow_stages import Collect, Groups, Pack
from tests.pipeline.view.watched import MEMORY_HERE, STEPS, Silent, small_run

from penstock import ReceiveChannel, SendChannel, SinkTrainer, TrainBatch, source
from penstock.errors import InvalidConfig, StageFailed


async def test_lines_show_the_beginning_the_last_step_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    await small_run().run(view="lines")

    out, errors = capsys.readouterr()
    first, *_, last, best, worst, end = errors.splitlines()
    assert out == ""
    assert first == "penstock: Groups → DropOdd → Pack → SinkTrainer"
    assert last.startswith(f"penstock: step {STEPS}/{STEPS}, ")
    for part in ("reward 1", "accuracy 0.875", "response_length/mean 5", "loss 0.25", "tokens/s"):
        assert part in last
    assert MEMORY_HERE.search(last)
    assert re.search(rf"\d+ begun = \d+ in flight \+ {2 * STEPS} trained", last)
    texts = "prompt: 2 tokens �[2J [bold]; completion: 6 tokens �[2J [bold]"
    assert best == f"penstock: best of step {STEPS}: reward 1, 4 tokens, stop; {texts.replace('6', '4')}"
    assert worst == f"penstock: worst of step {STEPS}: reward 1, 6 tokens, stop; {texts}"
    assert end.startswith("penstock: ended: SinkTrainer returned, after ")


async def test_where_stderr_is_no_terminal_the_view_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    await small_run().run(view="auto")

    assert f"step {STEPS}/{STEPS}" in capsys.readouterr().err


async def test_a_run_shows_nothing_unless_a_view_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    await small_run().run()

    assert capsys.readouterr() == ("", "")


async def test_a_run_that_fails_shows_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StageFailed, match="no such token"):
        await small_run("fail").run(view="lines")

    assert "penstock: ended: SinkTrainer raised ValueError: no such token" in capsys.readouterr().err


async def test_a_run_without_steps_says_from_time_to_time_what_its_stages_wait_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, printed = LoopClock(), list[str]()
    pipeline = source(Silent()).sink(Collect())

    def has_printed() -> bool:
        printed.append(capsys.readouterr().err)
        return "waiting: Collect for records from Silent" in "".join(printed)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(pipeline.run, view="lines"))
        await clock.set_forward_until(has_printed, 30.0)
        tasks.cancel_scope.cancel()

    assert "penstock: ended: cancelled" in "".join([*printed, capsys.readouterr().err])


@dataclass(frozen=True)
class Gated:
    """Sends one record when it is told to, and ends when the run does."""

    gate: anyio.Event

    async def run(self, outbox: SendChannel[int]) -> None:
        await self.gate.wait()
        await outbox.send(1)
        await anyio.sleep_forever()


@dataclass(frozen=True)
class Holds:
    """Receives one record, and holds it."""

    async def run(self, inbox: ReceiveChannel[int]) -> None:
        await inbox.receive()
        await anyio.sleep_forever()


async def test_before_the_first_step_a_second_passes_until_a_line_and_each_change_of_a_wait_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, gate, printed = LoopClock(), anyio.Event(), list[str]()
    pipeline = source(Gated(gate)).sink(Holds())

    def lines() -> list[str]:
        printed.append(capsys.readouterr().err)
        return "".join(printed).splitlines()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(pipeline.run, view="lines"))
        await clock.set_forward_until(lambda: len(lines()) == 2, 1.0)
        gate.set()
        await clock.set_forward_until(lambda: len(lines()) == 3, 1.0)
        tasks.cancel_scope.cancel()

    _, first, second, *_ = lines()
    assert "waiting: Holds for records from Gated" in first
    assert "waiting" not in second


async def test_an_unknown_view_is_refused() -> None:
    view: str = "table"

    with pytest.raises(InvalidConfig, match=r"^view: expected one of auto, live, lines, got 'table'$"):
        await small_run().run(view=view)  # type: ignore[arg-type]


class Still:
    """Trains nothing, and says so."""

    def step(self, _: TrainBatch) -> dict[str, float]:
        return {"lr": 0.0}


async def test_the_gravest_finding_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    run = source(Groups(200)).then(Pack()).sink(SinkTrainer(Still(), max_steps=50))

    await run.run(view="lines")

    lines = [line for line in capsys.readouterr().err.splitlines() if "finding" in line]
    assert len(lines) == 1
    assert lines[0].startswith("penstock: finding: learning_rate_zero: lr 0 in steps ")
    assert lines[0].endswith(
        "; try algorithm.optimizer.lr=1e-6 or algorithm.optimizer.schedule=constant (penstock diagnose)"
    )
