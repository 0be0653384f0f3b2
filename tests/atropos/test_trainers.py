"""Trainers as the sink of a pipeline: they poll over HTTP from within this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from tests.atropos.gateways import TRAINER, scored
from tests.atropos.talking import ANYWHERE, Talk, talking
from tests.failsafe import FAILSAFE_S

from penstock import Context, SendChannel, TrajectoryGroup
from penstock.channels import memory_channel
from penstock.integrations.atropos import AtroposTrainers
from penstock.testing import entered, group

NEVER_S = 10 * FAILSAFE_S
"""A time that no test waits for."""


def serves(departure_timeout_s: float = 0.01) -> AtroposTrainers:
    """Return a sink at a free port."""
    return AtroposTrainers(server=ANYWHERE, departure_timeout_s=departure_timeout_s)


@asynccontextmanager
async def serving(sink: AtroposTrainers, context: Context) -> AsyncGenerator[SendChannel[TrajectoryGroup]]:
    """Run `sink`, yield a channel that feeds it, and wait for its end."""
    outbox, inbox = memory_channel[TrajectoryGroup](1)

    async def run() -> None:
        with entered(context):
            async with inbox:
                await sink.run(inbox)

    with anyio.fail_after(FAILSAFE_S):
        async with anyio.create_task_group() as tasks, outbox:
            tasks.start_soon(run)
            yield outbox


def admitted(context: Context, number: int, lengths: tuple[int, ...] = (2, 2, 2, 2)) -> TrajectoryGroup:
    made = group(instance_id=str(number), completion_lengths=list(lengths))
    context.ledger.admit(made.id, made.rollout_ids.tolist())
    return made


async def test_a_batch_is_committed_when_it_was_written_or_acknowledged() -> None:
    sink, context = serves(), Context()
    made = [admitted(context, number) for number in range(3)]

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 4})
        for each in made[:2]:
            await outbox.send(each)
        await queued(talk, 2)
        await outbox.send(made[2])  # it waits, for two batches do
        first = await talk.get("/batch")
        leased = await talk.get("/batch?lease_s=60")
        await queued(talk, 1)
        lost = await talk.get("/batch?lease_s=0.000001")
        before = context.ledger.balance().ended["trained"]
        await talk.post("/acknowledge", {"lease": leased["lease"]})
        again = await talk.get("/batch?lease_s=60")
        await talk.post("/acknowledge", {"lease": again["lease"]})
        await outbox.aclose()

    assert before == 4
    assert lost["batch"] == again["batch"]
    assert [batch["batch"][0]["tokens"] for batch in (first, leased, again)] == [_rows(each) for each in made]
    assert context.ledger.balance().ended["trained"] == 12
    assert context.ledger.step == 3


async def test_a_batch_that_came_back_is_waited_for_at_the_end_and_may_be_acknowledged_late() -> None:
    sink, context = serves(), Context()
    made = [admitted(context, number) for number in range(2)]

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 4})
        for each in made:
            await outbox.send(each)
        await queued(talk, 2)
        long = await talk.get("/batch?lease_s=60")
        late = await talk.get("/batch?lease_s=0.000001")
        await outbox.aclose()
        await talk.post("/acknowledge", {"lease": long["lease"]})
        await anyio.wait_all_tasks_blocked()
        await talk.post("/acknowledge", {"lease": late["lease"]})

    assert context.ledger.balance().ended["trained"] == 8
    assert context.ledger.in_flight == 0


async def queued(talk: Talk, groups: int) -> None:
    """Wait until so many groups came through the pipeline."""
    while (await talk.get("/status"))["queue_size"] < groups:
        await checkpoint()


def _rows(made: TrajectoryGroup) -> list[list[int]]:
    return [row.tolist() for row in np.split(made.tokens, made.offsets[1:-1].tolist())]


async def test_a_group_that_waits_for_room_when_the_trainer_has_had_all_its_steps_is_lost() -> None:
    sink, context = AtroposTrainers(server=ANYWHERE), Context()

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 4, "starting_step": 0, "num_steps": 1})
        for number in range(4):  # two wait in the queue, the third for room there, and the last in the channel
            await outbox.send(admitted(context, number))
        batch = await talk.get("/batch?lease_s=60")
        await talk.post("/acknowledge", {"lease": batch["lease"]})

    ended = context.ledger.balance().ended
    assert (ended["trained"], ended["unfinished"]) == (4, 12)


async def test_what_makes_no_batch_is_lost_when_the_trainer_asked_in_vain() -> None:
    sink, context = serves(), Context()

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 8})
        await outbox.send(admitted(context, 0))
        await outbox.aclose()
        while (await talk.get("/status"))["queue_size"] == 0:
            await anyio.lowlevel.checkpoint()
        assert await talk.get("/batch") == {"batch": None}

    assert context.ledger.balance().reasons["unfinished"] == {"no trainer took it": 4}


async def test_it_ends_when_a_trainer_with_all_its_steps_has_received_null() -> None:
    """The example trainer collects batches until there is none; a batch beyond its steps would never be trained."""
    sink, context = serves(NEVER_S), Context()

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 4, "starting_step": 0, "num_steps": 2})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, outbox, [admitted(context, number) for number in range(4)])
            for _ in range(2):
                await _next_batch(talk)
            assert await talk.get("/batch") == {"batch": None}
            tasks.cancel_scope.cancel()

    assert context.ledger.balance().ended["trained"] == 8


async def test_after_the_end_of_the_stream_a_trainer_gets_null() -> None:
    sink, context = serves(NEVER_S), Context()

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 4, "starting_step": 0, "num_steps": 100})
        await outbox.send(admitted(context, 0))
        await outbox.aclose()
        await _next_batch(talk)
        assert [await talk.get("/batch") for _ in range(3)] == [{"batch": None}] * 3
        await talk.post("/register", TRAINER | {"batch_size": 4, "starting_step": 0, "num_steps": 0})

    assert context.ledger.balance().ended["trained"] == 4


async def test_a_trainer_that_acknowledges_its_batches_is_not_waited_for() -> None:
    sink, context = serves(NEVER_S), Context()

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 4, "starting_step": 0, "num_steps": 1})
        await outbox.send(admitted(context, 0))
        while (leased := await talk.get("/batch?lease_s=60"))["batch"] is None:
            await checkpoint()
        await talk.post("/acknowledge", {"lease": leased["lease"]})

    assert context.ledger.balance().ended["trained"] == 4


async def test_environments_are_refused_where_a_pipeline_samples() -> None:
    sink = serves()

    async with serving(sink, Context()) as outbox, talking(sink) as talk:
        status, answer = await talk.ask("POST", "/scored_data", scored())
        await outbox.aclose()

    assert status == 409
    assert "AtroposGateway" in answer["detail"]


async def test_a_group_that_no_batch_can_hold_is_rejected() -> None:
    sink, context = serves(), Context()

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 2})
        await outbox.send(admitted(context, 0))
        await outbox.aclose()

    assert context.ledger.balance().reasons["rejected"] == {"never packed": 4}


async def test_groups_that_make_up_no_batch_hold_back_none_that_do() -> None:
    sink, context = serves(), Context()
    made = [admitted(context, number, (2,) * (3 if number < 6 else 5)) for number in range(12)]

    batches: list[list[Any]] = []
    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 8, "starting_step": 0, "num_steps": 2})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, outbox, made)
            batches = [await _next_batch(talk) for _ in range(2)]
            tasks.cancel_scope.cancel()

    assert [sorted(len(one["scores"]) for one in batch) for batch in batches] == [[3, 5]] * 2
    assert context.ledger.balance().ended["trained"] == 16


async def _send_all(outbox: SendChannel[TrajectoryGroup], groups: list[TrajectoryGroup]) -> None:
    for each in groups:
        await outbox.send(each)


async def _next_batch(talk: Talk) -> list[Any]:
    while (batch := (await talk.get("/batch"))["batch"]) is None:
        await checkpoint()
    return list(batch)


async def test_groups_that_make_no_batch_of_one_size_are_kept_for_a_trainer_with_another() -> None:
    sink, context = serves(), Context()
    made = [admitted(context, number, (2,) * 5) for number in range(20)]

    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 64, "starting_step": 0, "num_steps": 20})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, outbox, made[:18])
            while (await talk.get("/status"))["queue_size"] < 18:
                assert (await talk.get("/batch"))["batch"] is None
        await talk.post("/register", TRAINER | {"batch_size": 5, "starting_step": 0, "num_steps": 20})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, outbox, made[18:])
            for _ in range(20):
                await _next_batch(talk)

    assert context.ledger.balance().ended["trained"] == 100


async def test_the_oldest_of_what_is_passed_over_for_long_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    sink, context = serves(), Context()
    made = [admitted(context, number, (2,) * 3) for number in range(30)]

    batch: list[Any] = []
    async with serving(sink, context) as outbox, talking(sink) as talk:
        await talk.post("/register", TRAINER | {"batch_size": 8, "starting_step": 0, "num_steps": 1})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, outbox, [*made, admitted(context, 30, (2,) * 5)])
            batch = await _next_batch(talk)

    rejected = context.ledger.balance().reasons["rejected"]["never packed"]
    assert sorted(len(one["scores"]) for one in batch) == [3, 5]
    assert 90 - 8 * 8 - 18 < rejected <= 90 - 7 * 8  # the newest eight batches' worth, and what came since, wait
    assert context.ledger.balance().ended == {"trained": 8, "unfinished": 95 - 8 - rejected, "rejected": rejected} | (
        dict.fromkeys(["filtered", "stale", "failed", "lost"], 0)
    )
    assert caplog.text.count("no batch could be made with it") == rejected // 3
