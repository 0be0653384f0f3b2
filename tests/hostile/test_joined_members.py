"""A member with the key and a place gets no more than its part, and what it may not send costs its connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs
from tests.failsafe import FAILSAFE_S
from tests.hostile.members import DIGEST, GROUP_SIZE, member, numbered
from tests.ports import free_port
from tests.processes.script_of_joined_workers import Rollouts
from tests.processes.worker_sinks import Commit
from tests.processes.worker_stages import Sample
from tests.wire import (
    Connected,
    Ending,
    EvaluationPart,
    Finished,
    Joins,
    Leaves,
    Left,
    Observations,
    Refused,
    Serving,
    Wants,
    WorkerEvent,
    WorkerReport,
)

from penstock import Pipeline, SourceEnv, joining, source
from penstock.channels import connect
from penstock.errors import NobodyListens
from penstock.policies import NoOpPolicy
from penstock.testing import group

GROUPS = 200

CONCURRENCY = 8

CAPACITY = 64
"""Groups of a worker that are sent, and not received yet."""


@dataclass
class Running:
    """A pipeline that runs beside a test."""

    url: str
    stage: Any
    sink: Commit = field(default_factory=Commit)
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        self.pipeline = source(self.stage, on=joining(expected=2, url=self.url, digest=DIGEST)).sink(self.sink)

    @property
    def trained(self) -> list[int]:
        return sorted(map(int, self.sink.received))

    @property
    def balance(self) -> Any:
        assert self.pipeline.report is not None
        balance = self.pipeline.report.balance
        assert balance.balanced
        assert balance.in_flight == 0
        return balance


def prompts(groups: int = GROUPS) -> SourceEnv:
    return SourceEnv(Rollouts, NoOpPolicy(), group_size=GROUP_SIZE, groups=groups, concurrency=CONCURRENCY)


@asynccontextmanager
async def running(stage: Any) -> AsyncIterator[Running]:
    """Run a pipeline whose workers join, until it has ended."""
    run = Running(f"tcp://127.0.0.1:{free_port()}", stage)
    with anyio.fail_after(FAILSAFE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.pipeline.run)
            while True:
                try:
                    async with connect(run.url, type(group())):
                        break
                except NobodyListens:
                    await anyio.sleep(0.01)
            yield run


async def finish(url: str) -> list[int]:
    """Sample all prompts that are left, as an honest worker."""
    async with member(url, name="honest") as honest:
        await honest.join()
        return await honest.sample_all()


async def test_a_worker_that_is_refused_is_told_so_and_cut_off_and_what_it_sends_is_not_trained() -> None:
    async with running(prompts()) as run:
        async with member(run.url, name="other") as other:
            other.report(Joins("another script"))
            await other.sender.send(numbered(0))
            assert isinstance(await other.instruction(), Refused)
            await other.disconnected()
        honest = await finish(run.url)

    assert run.trained == honest == list(range(GROUPS))
    assert run.balance.admitted == run.balance.ended["trained"] == GROUPS * GROUP_SIZE


async def test_a_worker_without_a_place_may_send_nothing_else() -> None:
    reports: list[WorkerEvent] = [Wants(), Connected("tcp", 1, "", ""), Leaves(), Finished()]
    async with running(prompts()) as run:
        for report in reports:
            async with member(run.url) as stranger:
                stranger.report(report)
                await stranger.disconnected()
        async with member(run.url) as stranger:
            observed = WorkerReport(Observations(totals={"forged": 1.0}), (), Joins(DIGEST))
            stranger.send(msgspec.msgpack.encode(observed))
            await stranger.disconnected()
        await finish(run.url)


async def test_a_record_of_a_prompt_that_was_never_assigned_costs_the_connection() -> None:
    async with running(prompts()) as run:
        async with member(run.url, name="forger") as forger:
            await forger.join()
            await forger.sample()
            await forger.sender.send(numbered(GROUPS - 1))
            await forger.disconnected()
            assert "expected trajectories that this worker was given" in str(forger.sender.failure)
        honest = await finish(run.url)

    assert run.trained == sorted({0, *honest})
    assert len(run.trained) == GROUPS


async def test_a_record_of_a_prompt_of_another_worker_costs_the_connection_and_the_other_one_nothing() -> None:
    async with running(prompts()) as run, member(run.url, name="honest") as honest:
        await honest.join()
        number = await honest.prompt()
        assert number is not None
        async with member(run.url, name="forger") as forger:
            await forger.join()
            await forger.sender.send(numbered(number))
            await forger.disconnected()
        await honest.sender.send(numbered(number))
        await honest.sample_all()

    assert run.trained == list(range(GROUPS))


async def test_more_repetitions_of_a_prompt_than_were_assigned_cost_the_connection() -> None:
    async with running(prompts()) as run:
        async with member(run.url, name="forger") as forger:
            await forger.join()
            number = await forger.prompt()
            await forger.sender.send(group(env="Rollouts", instance_id=str(number), completion_lengths=[1, 1, 1]))
            await forger.disconnected()
        await finish(run.url)

    assert run.trained == list(range(GROUPS))  # what the forger held, too


async def test_two_thousand_requests_for_prompts_get_no_more_than_a_worker_samples_at_once() -> None:
    async with running(prompts()) as run:
        async with member(run.url, name="greedy") as greedy:
            await greedy.join()
            for _ in range(2000):
                greedy.report(Wants())
            await greedy.disconnected()
            assert greedy.instructions.qsize() <= CONCURRENCY // GROUP_SIZE
        await finish(run.url)

    assert run.balance.ended["trained"] == GROUPS * GROUP_SIZE


async def test_a_worker_that_sends_nothing_gets_no_more_than_it_may_hold_and_goes_on_when_it_has_sent_some() -> None:
    most = CONCURRENCY // GROUP_SIZE + CAPACITY
    async with running(prompts()) as run, member(run.url, name="hoarder") as hoarder:
        await hoarder.join()
        held = [await hoarder.prompt() for _ in range(most)]
        hoarder.report(Wants())
        async with member(run.url, name="honest") as honest:
            await honest.join()
            for _ in range(20):  # each of its prompts is assigned after the hoarder has asked
                await honest.sample()
            assert hoarder.instructions.empty()
            for number in held:
                assert number is not None
                await hoarder.sender.send(numbered(number))
            ((prompt, _),) = (await hoarder.instruction()).prompts
            await hoarder.sender.send(numbered(int(prompt.instance_id)))
            await hoarder.sample_all()
            await honest.sample_all()

    assert run.trained == list(range(GROUPS))


async def test_ends_that_a_worker_of_another_source_reports_are_counted() -> None:
    async with running(Sample(0)) as run:
        for number in range(2):
            async with member(run.url, name=f"member {number}") as one:
                await one.join()
                await one.sender.send(numbered(number))
                unknown = Ending(numbered(9).id, (0,), "failed", "")
                one.send(msgspec.msgpack.encode(WorkerReport(None, (unknown,))))
                one.report(Finished())

    assert run.trained == [0, 1]
    assert run.balance.ended["failed"] == 2
    assert run.balance.admitted == 2 * GROUP_SIZE + 2


FORGED_REPORTS = {
    "trained": WorkerReport(None, (Ending(numbered(0).id, (0, 1), "trained", ""),)),  # type: ignore[arg-type]
    "an evaluation of another worker": WorkerReport(Observations(evaluations=[EvaluationPart(0, 7, 8)]), ()),
    "an evaluation of a later step": WorkerReport(Observations(evaluations=[EvaluationPart(2**62, 0, 1)]), ()),
    "a path in place of a URL": WorkerReport.of(Serving("shm:///dev/shm/other")),
    "a second place": WorkerReport.of(Joins(DIGEST)),
    "too many metrics": WorkerReport(Observations(gauges={str(n): 0.0 for n in range(20_000)}), ()),
    "a name that is too long": WorkerReport(Observations(gauges={"x" * 10_000: 0.0}), ()),
}


@pytest.mark.parametrize("forged", FORGED_REPORTS.values(), ids=FORGED_REPORTS)
async def test_a_report_that_this_worker_may_not_send_costs_its_connection(forged: WorkerReport) -> None:
    async with running(prompts(20)) as run:
        async with member(run.url, name="forger") as forger:
            await forger.join()
            forger.send(msgspec.msgpack.encode(forged))
            await forger.disconnected()
        await finish(run.url)

    assert run.trained == list(range(20))


async def test_texts_of_a_worker_are_escaped_in_logs_and_reports() -> None:
    with capture_logs() as logs:
        async with running(prompts(20)) as run:
            async with member(run.url, name="forger") as forger:
                forger.report(Joins(DIGEST))
                await forger.instruction()
                forger.report(Connected("tcp", 1, "\x1b[2J", "\x1b[2J"))
                await forger.prompt()
                forger.report(Left("\x1b[2J and a line\nforged"))
            await finish(run.url)

    assert any("\\x1b[2J" in str(entry) for entry in logs)
    assert not any("\x1b" in str(value) for entry in logs for value in entry.values())


async def test_metrics_of_a_worker_may_grow_to_a_bound_only() -> None:
    async with running(prompts(20)) as run:
        async with member(run.url, name="forger") as forger:
            await forger.join()
            for part in range(10):
                gauges = {f"{part}/{n}": 0.0 for n in range(4000)}
                forger.send(msgspec.msgpack.encode(WorkerReport(Observations(gauges=gauges), ())))
            await forger.disconnected()
        await finish(run.url)


async def test_an_ordinary_member_is_not_disconnected() -> None:
    with capture_logs() as logs:
        async with running(prompts(20)) as run:
            await finish(run.url)

    rejected = [entry["reason"] for entry in logs if entry["event"] == "peer_rejected"]
    # ZeroMQ may begin another connection for the member, which has left then; it has no name yet.
    assert [reason for reason in rejected if "(pid" in reason] == []
