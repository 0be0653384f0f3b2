"""Real processes: each test starts one or two, which takes about a second."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.stages.answers import answering, drive_text

from penstock import RewardBridge, TrajectoryGroup
from penstock._pipeline.workers import call_process
from penstock._stages.rewards import math_process
from penstock.errors import CallProcessDied, MissingColumn, MissingExtra
from penstock.rewards import MathVerify, RewardInput

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"
"""It takes more than any bound."""


def bridge(**options: Any) -> RewardBridge:
    return RewardBridge(functions=[MathVerify(**options)])


def question(*completions: str, answer: object = "0.5", instance_id: str = "0") -> TrajectoryGroup:
    return answering(*completions, meta={"row": {"answer": answer}}, instance_id=instance_id)


def children() -> list[int]:
    """Return the processes of math-verify that this one has started."""
    started = Path("/proc/thread-self/children").read_text().split()
    return [int(pid) for pid in started if b"math_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_an_answer_counts_in_any_notation_and_unreadable_ones_are_left_out() -> None:
    groups = [
        question(r"It is $\frac{1}{2}$.", r"First 7, then \boxed{.5}", "2", "no idea"),
        question("72", "71", answer=72, instance_id="1"),
        question(r"\boxed{x=\frac{3}{4}}", answer=r"\frac{3}{4}", instance_id="2"),
        question("0", answer="", instance_id="3"),
    ]

    out = await drive_text(bridge(weight=2), groups)

    assert [group.rewards.tolist() for group in out] == [[2, 2, 0, 0], [2, 0], [2]]
    assert out.metrics.emit(0)["rewards/math_verify/mean"] == pytest.approx(4 / 7)
    assert out.ledger.balance().reasons["filtered"] == {"no reward function applies": 1}
    assert children() == []


def completion(text: str) -> RewardInput:
    return RewardInput(trajectory=question(text)[0], score=0.0, text=text, meta={"row": {"answer": "4"}})


async def test_a_process_whose_call_times_out_is_replaced() -> None:
    async with MathVerify().open() as judge:
        (process,) = children()

        with anyio.move_on_after(0.1):
            await judge(completion(ENDLESS))

        assert process not in children()
        assert await judge(completion("4")) == 1


async def test_a_process_that_dies_fails_one_call_and_is_replaced() -> None:
    async with MathVerify().open() as judge:
        (process,) = children()

        async def fails() -> None:
            with pytest.raises(CallProcessDied, match="the process of math-verify, got its end with status -9"):
                await judge(completion(ENDLESS))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fails)
            await anyio.wait_all_tasks_blocked()
            os.kill(process, signal.SIGKILL)

        assert await judge(completion("4")) == 1


def test_a_verdict_depends_on_processor_time_and_on_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "alarm", None)
    monkeypatch.setattr(math_process, "GIVE_UP_S", 0.5)
    math_process.compare("1", "1")  # compiles the grammar

    with math_process.bounded():
        assert math_process.compare("4", r"\boxed{4}")
        assert not math_process.compare("4", ENDLESS)


async def test_a_column_that_the_data_lacks_ends_the_run() -> None:
    with pytest.raises(MissingColumn, match=r"expected the data to have a column 'anser', .*; did you mean 'answer'\?"):
        await drive_text(bridge(answer="anser"), [question("4")])


async def test_a_process_that_is_not_ready_in_time_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_process, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(call_process, "child_program", lambda *_: (["sleep", "600"], None))

    with pytest.raises(CallProcessDied, match=r"ready within 0.1 s, got no answer, and killed it"):
        async with MathVerify().open():
            pass


async def test_without_the_extra_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[math\]'"):
        await drive_text(bridge(), [question("4")])
