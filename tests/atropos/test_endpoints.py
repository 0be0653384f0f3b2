"""Groups whose sender, and batches whose reader, disconnects. The application is called without a server."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.atropos.gateways import TRAINER, scored

from penstock import TrajectoryGroup
from penstock._stages.http.limits import Bodies, BodyRefused, RequestRejections
from penstock._stages.integrations.atropos.queue.records import Submission
from penstock._stages.integrations.atropos.queue.trajectory_queue import TrajectoryQueue
from penstock._stages.integrations.atropos.server.app import application
from penstock._stages.integrations.atropos.server.backend import RelayBackend
from penstock._stages.integrations.atropos.server.endpoints import (
    LARGE_BYTES,
    PIPELINE_BACKLOG,
    SENDING_TIMEOUT_S,
    Endpoints,
)
from penstock._stages.integrations.atropos.server.shm_receiver import ShmIngest, ShmReceiver
from penstock._stages.integrations.atropos.translation import from_group
from penstock.integrations.atropos import Limits, ServerConfig
from penstock.testing import group

HOST = "127.0.0.1"


class Noting(RelayBackend):
    """A backend that notes how many groups it was notified of at a time."""

    def __init__(self) -> None:
        self.arrivals: list[int] = []

    def arrived(self, submissions: Sequence[Submission[bytes]]) -> None:
        self.arrivals.append(len(submissions))


@dataclass
class Gateway:
    """One that is asked without a socket."""

    now: float = 0.0
    queue: TrajectoryQueue[bytes] = field(default_factory=TrajectoryQueue)
    limits: Limits = field(default_factory=Limits)
    backend: Noting = field(default_factory=Noting)

    def __post_init__(self) -> None:
        self.endpoints = Endpoints(self.queue, self.backend, self.limits, RequestRejections(), clock=lambda: self.now)
        self.app = application(self.endpoints, ServerConfig(), HOST)

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        disconnect_after: int = 100,
        meanwhile: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[int | None, Any]:
        """Return status and JSON, None where that is cut off; the client disconnects after so many messages."""
        path, _, query = path.partition("?")
        headers = [(b"host", HOST.encode()), (b"content-type", b"application/json")]
        sent_body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if isinstance(body, bytes):  # gzip
            headers.append((b"content-encoding", b"gzip"))
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": headers}
        passed, sent = 0, list[MutableMapping[str, Any]]()

        async def receive() -> dict[str, Any]:
            nonlocal passed
            passed += 1
            if passed > disconnect_after:
                if meanwhile is not None:
                    await meanwhile()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": sent_body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal passed
            passed += 1
            if passed <= disconnect_after:
                sent.append(message)
            if meanwhile is not None and message.get("body") == b"" and message.get("more_body"):
                await meanwhile()

        await self.app(scope, receive, send)
        if not sent:
            return None, None
        whole = "body" in sent[-1] and not sent[-1].get("more_body", False)
        answer = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(answer) if whole else None


async def test_groups_whose_answer_was_not_delivered_are_accepted_once() -> None:
    gateway = Gateway()

    assert await gateway.ask("POST", "/scored_data", scored(), disconnect_after=1) == (None, None)
    assert gateway.queue.status().queue_size == 1
    assert (await gateway.ask("POST", "/scored_data", scored()))[1] == {"status": "received"}
    assert gateway.queue.status().queue_size == 1
    await gateway.ask("POST", "/scored_data", scored())  # one that was answered means another group
    assert gateway.queue.status().queue_size == 2
    assert gateway.backend.arrivals == [1, 0, 1]


async def test_groups_that_were_accepted_before_a_reset_are_accepted_again_after_it() -> None:
    gateway = Gateway()

    async def meanwhile() -> None:
        gateway.queue.reset()

    await gateway.ask("POST", "/scored_data", scored(), disconnect_after=1, meanwhile=meanwhile)
    await gateway.ask("POST", "/scored_data", scored())

    assert gateway.queue.status().queue_size == 1


async def test_a_trainer_that_disconnects_before_the_answer_gets_no_batch() -> None:
    gateway = Gateway()
    await gateway.ask("POST", "/register", TRAINER)
    await gateway.ask("POST", "/scored_data", scored(8))

    assert await gateway.ask("GET", "/batch", disconnect_after=0) == (None, None)
    assert gateway.queue.status().queue_size == 1


@pytest.mark.parametrize("path", ["/batch", "/batch?lease_s=3600"])
async def test_a_batch_that_was_not_read_to_its_end_is_in_the_next_answer(path: str) -> None:
    gateway = Gateway()
    await gateway.ask("POST", "/register", TRAINER)
    await gateway.ask("POST", "/scored_data", scored(8, mark=1.0))

    for messages in (3, 4):  # a look, the status, the groups, what waits until they are written
        status, cut_off = await gateway.ask("GET", path, disconnect_after=messages)
        assert (status, cut_off) == (200, None)
    batch = (await gateway.ask("GET", "/batch"))[1]["batch"]

    assert batch[0]["scores"][0] == 1.0
    assert (await gateway.ask("GET", "/batch"))[1] == {"batch": None}
    assert gateway.queue.status().current_step == 4


async def test_a_batch_that_took_so_long_to_be_read_that_another_has_it_is_cut_off() -> None:
    gateway = Gateway()
    await gateway.ask("POST", "/register", TRAINER)
    await gateway.ask("POST", "/scored_data", scored(8, mark=1.0))
    others = list[Any]()

    async def meanwhile() -> None:
        gateway.now += SENDING_TIMEOUT_S
        others.append((await gateway.ask("GET", "/batch"))[1])

    slow = (await gateway.ask("GET", "/batch", meanwhile=meanwhile))[1]

    assert others[0]["batch"][0]["scores"][0] == 1.0
    assert slow is None


async def test_where_too_many_bodies_arrive_at_once_the_next_is_asked_to_come_again() -> None:
    gateway = Gateway(limits=Limits(held_bytes=10))

    status, answer = await gateway.ask("POST", "/scored_data", scored())

    assert status == 503
    assert "try again later" in answer["detail"]


@pytest.mark.parametrize(("spaces", "in_a_thread"), [(0, False), (LARGE_BYTES, True)])
@pytest.mark.parametrize("path", ["/register", "/scored_data"])
async def test_what_is_large_once_inflated_is_read_beside_the_event_loop(
    path: str,
    spaces: int,
    in_a_thread: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    body = gzip.compress(json.dumps(TRAINER if path == "/register" else scored()).encode() + b" " * spaces)
    threads, really = list[threading.Thread](), Bodies.inflate

    def inflate(bodies: Bodies, body: bytes) -> bytes:
        threads.append(threading.current_thread())
        return really(bodies, body)

    monkeypatch.setattr(Bodies, "inflate", inflate)
    assert (await gateway.ask("POST", path, body))[0] == 200

    assert len(body) < 1000
    assert [thread is not threading.main_thread() for thread in threads] == [in_a_thread]


@pytest.mark.parametrize("said", [0, 99, 101, 2**32 - 1])
def test_gzip_that_declares_another_size_is_refused(said: int) -> None:
    honest = gzip.compress(b" " * 100)

    assert Bodies(Limits()).inflate(honest) == b" " * 100
    with pytest.raises(BodyRefused, match="Invalid gzip payload"):
        Bodies(Limits()).inflate(honest[:-4] + said.to_bytes(4, "little"))


async def test_senders_wait_for_a_pipeline_that_takes_groups_and_not_for_one_that_takes_none() -> None:
    gateway = Gateway(queue=TrajectoryQueue(batches=False))
    for _ in range(PIPELINE_BACKLOG + 4):
        await gateway.ask("POST", "/scored_data", scored())

    async def take_one_a_turn() -> None:
        while gateway.queue.take(0.0) is not None:
            await anyio.lowlevel.checkpoint()

    waiting = [gateway.queue.waiting]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_one_a_turn)
        await gateway.ask("POST", "/scored_data", scored())
        waiting.append(gateway.queue.waiting)

    assert waiting[0] == PIPELINE_BACKLOG + 4
    assert waiting[1] <= PIPELINE_BACKLOG


class FullReceiver(ShmReceiver):
    """Shared memory in which groups lie already."""

    def __init__(self, groups: list[TrajectoryGroup]) -> None:
        self.url = ""
        self._groups = groups

    async def __aiter__(self) -> AsyncIterator[tuple[int | None, TrajectoryGroup]]:
        while self._groups:
            yield None, self._groups.pop(0)
        await anyio.sleep_forever()

    def waiting(self, env_id: int) -> int:  # noqa: ARG002 (as the real one)
        return len(self._groups)


async def test_groups_in_shared_memory_wait_there_while_the_queue_is_full() -> None:
    gateway = Gateway(queue=TrajectoryQueue(capacity=1))
    groups = [group(instance_id=str(number)) for number in range(3)]
    receiver = FullReceiver(groups)
    ingest: ShmIngest[bytes] = ShmIngest(receiver)
    waiting, taken = list[int](), list[bytes]()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ingest.run, gateway.endpoints)
        await anyio.wait_all_tasks_blocked()
        waiting = [len(kept) for kept in ingest._retained.values()]
        while (submission := gateway.queue.take(0.0)) is not None:
            taken.append(submission.payload)
            gateway.endpoints.room.wake_all()
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert waiting == [2]
    assert taken == [from_group(group(instance_id=str(number))) for number in range(3)]
    assert not ingest._retained
