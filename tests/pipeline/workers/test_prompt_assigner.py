"""The assignment of a source's prompts to its workers, without processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from penstock import GroupId
from penstock._pipeline.accounting.repetition_sets import mask_of
from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.graph.assignment import Assignment, Samplers
from penstock._pipeline.graph.context import Worker
from penstock._pipeline.graph.edge import EdgeCounter
from penstock._pipeline.workers.prompt_assigner import PromptAssigner
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._pipeline.workers.worker_messages import Assigned, NoneLeft, decode_instruction
from penstock._schemas.control import PROTOCOL_VERSION, Connect, Instruction, Message
from penstock.accounting import Ledger, Metrics
from penstock.errors import PeerLost, ProtocolMismatch
from penstock.testing import group

NONE_LEFT = "none left"


def prompt(name: str) -> GroupId:
    return GroupId("test", name)


class Source:
    """Windows of prompts, each a word of names of one letter; workers by name, in the places of their order."""

    def __init__(self, windows: str, workers: str = "12", *, at_a_time: int = 1, at_first: int = 1) -> None:
        self.windows = windows.split()
        self.ledger = Ledger()
        self.accounting = WorkerAccounting(self.ledger, Metrics(), EdgeCounter(), source=True, assigned=True)
        self.peers: dict[str, Peer] = {}
        self.told: dict[str, list[str]] = {}
        """The names of the prompts of each instruction to each worker."""
        self.absent: set[str] = set()
        """Those that have ended, or are leaving."""
        self.waits_for_all = False
        """True if the source waits before each window until all that was assigned has arrived."""
        for name in workers:
            self.join(name)
        self.assigner = PromptAssigner(
            self.assign, self.ledger, self.accounting, self.place_of, at_a_time=at_a_time, at_first=at_first
        )

    async def assign(self, samplers: Samplers) -> AsyncIterator[Sequence[Assignment]]:
        for window in self.windows:
            if self.waits_for_all:
                await samplers.hold_none()
            for name in window:
                self.ledger.admit(prompt(name), [0, 1])
            yield [Assignment(prompt(name), 0b11) for name in window]

    def join(self, name: str) -> None:
        def tell(_identity: bytes, message: Message) -> bool:
            assert isinstance(message, Instruction)
            instruction = decode_instruction(message.payload)
            if isinstance(instruction, Assigned):
                assert {mask_of(repetitions) for _, repetitions in instruction.prompts} == {0b11}
                self.told[name].append("".join(group.instance_id for group, _ in instruction.prompts))
            else:
                assert isinstance(instruction, NoneLeft)
                self.told[name].append(NONE_LEFT)
            return True

        request = Connect(PROTOCOL_VERSION, "shm", "group", name.encode(), name, 7)
        self.peers[name] = Peer(request, lambda _: None, 1, tell)
        self.told[name] = []
        self.accounting.open(name, Worker(len(self.peers) - 1, 1))

    def place_of(self, peer: Peer) -> int | None:
        return None if peer.name in self.absent else list(self.peers).index(peer.name)

    async def ask(self, *workers: str) -> None:
        """Have workers ask for prompts, one after another."""
        for name in workers:
            self.assigner.ask(self.peers[name])
            await wait_all_tasks_blocked()

    async def send(self, worker: str, prompts: str) -> None:
        """Have a worker send what it sampled."""
        for name in prompts:
            self.accounting.received(self.peers[worker], group(instance_id=name))
        await wait_all_tasks_blocked()

    async def die(self, worker: str) -> None:
        self.absent.add(worker)
        self.assigner.workers_changed()
        self.accounting.ended(worker, f"{worker} was killed")
        self.accounting.lost(self.peers[worker], PeerLost())
        await wait_all_tasks_blocked()

    async def leave(self, worker: str) -> None:
        self.absent.add(worker)
        self.assigner.workers_changed()
        await wait_all_tasks_blocked()


@asynccontextmanager
async def running(source: Source) -> AsyncIterator[Source]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.assigner.run)
        await wait_all_tasks_blocked()
        yield source
        tasks.cancel_scope.cancel()


# -- one prompt at a time ----------------------------------------------------------------------------------------------


async def test_a_prompt_goes_to_the_worker_that_holds_the_fewest() -> None:
    async with running(Source("a b c d", at_a_time=4)) as source:
        for worker in "1111222":
            source.assigner.ask(source.peers[worker])
        await wait_all_tasks_blocked()

    assert source.told == {"1": ["a", "c"], "2": ["b", "d"]}


async def test_of_workers_that_hold_as_many_a_prompt_goes_to_the_one_that_has_asked_for_the_longest_time() -> None:
    source = Source("a b c", "123")
    source.waits_for_all = True
    async with running(source):
        await source.ask("1", "3", "2")
        assert source.told == {"1": ["a"], "2": [], "3": []}

        await source.send("1", "a")
        assert source.told == {"1": ["a"], "2": [], "3": ["b"]}
        await source.send("3", "b")

    assert source.told == {"1": ["a"], "2": ["c"], "3": ["b"]}


async def test_a_worker_that_asks_ahead_is_served_when_it_has_room() -> None:
    async with running(Source("a b c d", at_a_time=2)) as source:
        source.accounting.most_held = 1
        await source.ask("1", "2", "2", "1")
        assert source.told == {"1": ["a"], "2": ["b"]}

        await source.send("1", "a")
        await source.send("2", "b")

    assert source.told == {"1": ["a", "c"], "2": ["b", "d"]}


async def test_no_prompt_is_drawn_before_a_worker_asks_for_it() -> None:
    async with running(Source("a b")) as source:
        assert source.ledger.balance().admitted == 0

        await source.ask("2")

    assert source.told == {"1": [], "2": ["a"]}
    assert source.ledger.balance().admitted == 2


async def test_a_worker_that_holds_as_much_as_it_may_waits_and_another_one_is_served() -> None:
    async with running(Source("a b")) as source:
        source.accounting.most_held = 1
        await source.ask("1", "1", "2")

    assert source.told == {"1": ["a"], "2": ["b"]}


async def test_a_worker_that_is_leaving_gets_nothing_for_what_it_has_asked() -> None:
    source = Source("a b", at_a_time=2)
    source.accounting.most_held = 1
    async with running(source):
        await source.ask("1", "1")
        await source.leave("1")
        await source.send("1", "a")
        await source.ask("2")

    assert source.told == {"1": ["a"], "2": ["b"]}


async def test_a_worker_that_asks_for_more_than_it_may_is_refused() -> None:
    source = Source("", at_a_time=2)

    for _ in range(2):
        source.assigner.ask(source.peers["1"])
    source.assigner.ask(source.peers["2"])
    with pytest.raises(ProtocolMismatch, match="expected at most 2 requests for prompts at a time, got more"):
        source.assigner.ask(source.peers["1"])


# -- windows of several prompts ----------------------------------------------------------------------------------------


async def test_a_window_is_shared_evenly_in_the_order_of_the_places() -> None:
    async with running(Source("abcde", "123", at_first=3)) as source:
        await source.ask("3", "1", "2")

    assert source.told == {"1": ["ad"], "2": ["be"], "3": ["c"]}


async def test_the_first_window_waits_for_all_workers_that_were_started() -> None:
    async with running(Source("abcd", at_first=2)) as source:
        await source.ask("1")
        assert source.told == {"1": [], "2": []}

        await source.ask("2")

    assert source.told == {"1": ["ac"], "2": ["bd"]}


async def test_a_window_waits_for_all_workers_that_have_begun() -> None:
    async with running(Source("abcd efgh", "123", at_first=2)) as source:
        await source.ask("2", "1")
        await source.send("1", "ac")
        await source.ask("1")
        assert source.told == {"1": ["ac"], "2": ["bd"], "3": []}
        await source.ask("3")
        assert source.told["3"] == []

        await source.ask("2")

    assert source.told == {"1": ["ac", "eh"], "2": ["bd", "f"], "3": ["g"]}


async def test_a_window_waits_no_longer_for_a_worker_that_is_leaving() -> None:
    async with running(Source("abcd efgh", at_first=2)) as source:
        await source.ask("1", "2")
        await source.ask("1")
        await source.leave("2")

    assert source.told == {"1": ["ac", "efgh"], "2": ["bd"]}


async def test_a_small_window_goes_to_the_first_places() -> None:
    async with running(Source("ab cd", "123", at_first=3)) as source:
        await source.ask("3", "2", "1")
        assert source.told == {"1": ["a"], "2": ["b"], "3": []}

        await source.ask("2", "1")

    assert source.told == {"1": ["a", "c"], "2": ["b", "d"], "3": []}


async def test_a_source_may_wait_until_all_that_was_assigned_has_arrived() -> None:
    source = Source("ab cd", at_first=2)
    source.waits_for_all = True
    async with running(source):
        await source.ask("1", "2", "1", "2")
        await source.send("1", "a")
        assert source.ledger.balance().admitted == 4

        await source.send("2", "b")

    assert source.told == {"1": ["a", "c"], "2": ["b", "d"]}


# -- workers that die --------------------------------------------------------------------------------------------------


async def test_a_prompt_of_a_dead_worker_is_assigned_again_before_any_other() -> None:
    async with running(Source("a b c")) as source:
        await source.ask("1")
        await source.die("1")
        assert source.assigner.groups_held == 1
        await source.ask("2", "2")

    assert source.told == {"1": ["a"], "2": ["a", "b"]}
    assert source.ledger.balance().admitted == 4


async def test_a_prompt_with_which_two_workers_have_died_is_lost() -> None:
    async with running(Source("a b", "123")) as source:
        await source.ask("1")
        await source.die("1")
        await source.ask("2")
        await source.die("2")
        assert source.ledger.balance().reasons["lost"] == {"2 was killed": 2}
        await source.ask("3")

    assert source.told == {"1": ["a"], "2": ["a"], "3": ["b"]}


async def test_the_share_of_a_dead_worker_is_shared_again_by_the_others() -> None:
    async with running(Source("abcdef gh", "123", at_first=3)) as source:
        await source.ask("1", "2", "3")
        await source.die("2")
        await source.ask("1", "3")

    assert source.told == {"1": ["ad", "b"], "2": ["be"], "3": ["cf", "e"]}


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_none_is_left_only_when_all_has_arrived() -> None:
    over: list[bool] = []
    async with running(Source("a")) as source:
        source.assigner.on_over = lambda: over.append(source.assigner.over)
        await source.ask("1", "2")
        assert (source.told, over) == ({"1": ["a"], "2": []}, [])

        await source.send("1", "a")
        await source.ask("1")

    assert source.told == {"1": ["a", NONE_LEFT], "2": [NONE_LEFT]}
    assert over
    assert all(over)


async def test_one_that_waits_gets_the_last_prompt_of_a_worker_that_dies() -> None:
    async with running(Source("a")) as source:
        await source.ask("1", "2")
        await source.die("1")
        assert source.told["2"] == ["a"]

        await source.ask("2")
        await source.send("2", "a")

    assert source.told["2"] == ["a", NONE_LEFT]


async def test_the_end_is_noticed_though_no_worker_is_left() -> None:
    async with running(Source("a")) as source:
        await source.ask("1")
        await source.send("1", "a")
        assert not source.assigner.over

        await source.leave("1")

    assert source.assigner.over
