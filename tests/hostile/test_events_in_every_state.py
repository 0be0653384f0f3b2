"""Each event that a member with the key may report, in each of its states: it is refused, or is its own matter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from tests.hostile.members import DIGEST, Member, member
from tests.hostile.test_joined_members import finish, prompts, running
from tests.wire import (
    Connected,
    CreditRequest,
    Dies,
    Failed,
    Finished,
    Joined,
    Joins,
    Leaves,
    Left,
    Message,
    Ready,
    Serving,
    Subscribe,
    Wants,
    WorkerEvent,
)

from penstock.errors import SenderRejected, WorkerFailed

PROMPTS = 20

EVENTS: list[WorkerEvent] = [
    Connected("tcp", 1, "", ""),
    Dies("forged"),
    Failed("raised ValueError: forged", "forged"),
    Finished(),
    Joins(DIGEST),
    Leaves(),
    Left("forged"),
    Serving("tcp://127.0.0.1:1"),
    Wants(),
]

MESSAGES: list[Message] = [Ready(), Subscribe(1, "forged", 1)]
"""Messages of the channel that a sender never sends."""


async def connected(_: Member) -> None:
    pass


async def placed(one: Member) -> None:
    one.report(Joins(DIGEST))
    assert isinstance(await one.instruction(), Joined)


async def at_work(one: Member) -> None:
    await one.join()


async def leaving(one: Member) -> None:
    await one.join()
    one.report(Leaves())


async def left(one: Member) -> None:
    await one.join()
    one.report(Left("it was stopped"))


async def finished(one: Member) -> None:
    await one.join()
    one.report(Finished())


State = Callable[[Member], Awaitable[None]]

TAKEN: dict[State, set[type[WorkerEvent]]] = {
    connected: {Joins},
    placed: {Connected, Dies, Finished, Leaves, Left, Wants},
    at_work: {Dies, Finished, Leaves, Left, Wants},
    leaving: {Dies, Finished, Left, Wants},
    left: set(),
    finished: set(),
}
"""Events that are taken in each state, besides `Failed`; all else costs the connection."""


@pytest.mark.parametrize("state", TAKEN, ids=lambda state: state.__name__)
async def test_an_event_is_refused_or_costs_nobody_else_anything(state: State) -> None:
    async with running(prompts(PROMPTS)) as run:
        for event in EVENTS:
            if isinstance(event, Failed) and TAKEN[state] - {Joins}:
                continue  # see below
            async with member(run.url, name=f"a {state.__name__} member") as one:
                await state(one)
                one.report(event)
                if type(event) not in TAKEN[state]:
                    await one.disconnected()
            refused = isinstance(one.sender.failure, SenderRejected)
            assert refused == (type(event) not in TAKEN[state]), event
        for message in MESSAGES:
            async with member(run.url, name=f"a {state.__name__} member") as one:
                await state(one)
                one.sender._connection.send(message)
                await one.disconnected()
        async with member(run.url, name="another") as one:
            await state(one)
            one.sender._connection.send(CreditRequest())
        trained = await finish(run.url)

    assert set(run.trained) >= set(trained)
    assert run.balance.admitted == PROMPTS * 2
    assert run.balance.ended["trained"] == len(run.trained) * 2
    assert run.balance.ended["lost"] <= 2 * 2  # what two members that had asked for a prompt left undone


@pytest.mark.parametrize("state", [placed, at_work, leaving], ids=lambda state: state.__name__)
async def test_a_member_that_has_a_place_may_say_that_its_stage_failed_which_ends_the_run(state: State) -> None:
    async def fail() -> None:
        async with running(prompts(PROMPTS)) as run, member(run.url) as one:
            await state(one)
            one.report(Failed("raised ValueError: forged", "forged"))

    with pytest.raises(BaseExceptionGroup) as raised:
        await fail()

    assert raised.group_contains(WorkerFailed, match="raised ValueError: forged")
