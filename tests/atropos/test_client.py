"""The client at real sockets: a server that answers with given responses, or violates the contract."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import anyio.abc
import numpy as np
import pytest
from aiohttp import web
from anyio.abc import SocketAttribute
from anyio.lowlevel import checkpoint
from structlog.testing import capture_logs
from tests.fixed_limits import set_limits
from tests.ports import free_port

from penstock import Context, GroupId, ReceiveChannel, TrajectoryGroup, drop, source
from penstock.channels import memory_channel
from penstock.integrations.atropos import AtroposAPIError, AtroposClient, AtroposTrainers, ServerConfig
from penstock.policies import Backoff
from penstock.testing import Driven, drive_sink, drive_source, entered, group

GROUP: dict[str, Any] = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [1.0], "env_id": 0, "advantages": []}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, BACKOFF=Backoff(2, 0.001, 0.002), POLLS=Backoff(2**62, 0.001, 0.002))


def batch(*scores: float, **more: Any) -> dict[str, Any]:
    """Return an answer of /batch: a group of one sequence for each score."""
    return {"batch": [GROUP | {"scores": [score]} for score in scores], **more}


UNKNOWN = {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []}


@dataclass
class Server:
    """Answers `/batch` with one answer after another, then with none; and what it was asked."""

    answers: deque[Any] = field(default_factory=deque)
    greeting: Callable[[], web.StreamResponse] = lambda: web.json_response({"message": "AtroposLib API"})
    info: dict[str, Any] = field(default_factory=lambda: {"batch_size": 2, "max_token_len": 64})
    asked: list[str] = field(default_factory=list)
    registered: list[dict[str, Any]] = field(default_factory=list)
    acknowledged: list[Any] = field(default_factory=list)
    refuses: dict[str, web.StreamResponse] = field(default_factory=dict)
    stops_after: int | None = None
    """Batches, after which it stops until `listen` is called again."""
    stopped: anyio.Event = field(default_factory=anyio.Event)
    url: str = ""
    runner: web.AppRunner | None = None
    site: web.TCPSite | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        if request.path in self.refuses:
            return copy(self.refuses[request.path])  # an answer is sent once
        match request.path:
            case "/":
                return self.greeting()
            case "/info":
                return web.json_response(self.info)
            case "/register":
                self.registered.append(await request.json())
                return web.json_response({"uuid": 2**127})
            case "/acknowledge":
                self.acknowledged.append((await request.json())["lease"])
                return web.json_response({"status": "success"})
        answer = self.answers.popleft() if self.answers else {"batch": None}
        response = answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        if self.polls() == self.stops_after and self.site is not None:
            response.force_close()
            await self.site.stop()
            self.stopped.set()
        return response

    async def listen(self, port: int = 0) -> None:
        assert self.runner is not None
        self.site = web.TCPSite(self.runner, "127.0.0.1", port)
        await self.site.start()

    def polls(self) -> int:
        return sum(asked.startswith("GET /batch") for asked in self.asked)


@asynccontextmanager
async def serving(*answers: Any, **more: Any) -> AsyncIterator[Server]:
    """Start a server at a port of its own."""
    server = Server(deque(answers), **more)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    server.runner = runner
    await server.listen()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def client(url: str, **changed: Any) -> AtroposClient:
    """Return a client that registers for two batches."""
    rules: dict[str, Any] = {"batch_size": 2, "max_token_len": 64, "num_steps": 2}
    return AtroposClient(api_url=url, **(rules | changed))


async def driven(server: Server, **changed: Any) -> Driven[TrajectoryGroup]:
    return await drive_source(client(server.url, **changed))


def counted(received: Driven[TrajectoryGroup]) -> dict[str, float]:
    found: dict[str, float] = {}
    received.metrics.sinks.append(lambda metrics, _: found.update(metrics))
    received.metrics.emit(1)
    return found


def scores(received: Driven[TrajectoryGroup]) -> list[float]:
    return [float(group.rewards[0]) for group in received]


# -- what comes --------------------------------------------------------------------------------------------------------


async def test_it_registers_polls_and_ends_with_the_last_batch() -> None:
    async with serving({"batch": None}, batch(1.0, 0.5), {"batch": None}, batch(0.25), batch(9.0)) as server:
        received = await driven(server, wandb_group="g", lease_s=None)

    assert scores(received) == [1.0, 0.5, 0.25]
    assert server.asked == ["GET /", "POST /register", "GET /info", *["GET /batch"] * 4]
    assert server.registered == [
        {
            "wandb_group": "g",
            "wandb_project": "",
            "batch_size": 2,
            "max_token_len": 64,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 2,
        }
    ]


async def test_a_training_that_goes_on_asks_for_what_is_left_of_it() -> None:
    async with serving(batch(1.0), batch(2.0)) as server:
        received = await driven(server, starting_step=1)

    assert scores(received) == [1.0]
    assert server.registered[0]["starting_step"] == 1


async def test_groups_have_names_that_no_other_training_gives() -> None:
    async with serving(batch(1.0, 1.0), batch(1.0, 1.0)) as server:
        one, other = [await driven(server, num_steps=1) for _ in range(2)]

    assert len({group.id for group in (*one, *other)}) == 4
    assert {group.env for group in one} == {"atropos.0"}


async def test_a_server_that_was_restarted_gets_the_current_step() -> None:
    async with serving(batch(1.0), UNKNOWN, batch(2.0)) as server:
        received = await driven(server)

    assert scores(received) == [1.0, 2.0]
    assert [registration["starting_step"] for registration in server.registered] == [0, 1]


async def test_a_group_that_cannot_be_trained_on_is_left_out_and_counted() -> None:
    wrong = GROUP | {"masks": [[-100, 7]]}
    async with serving({"batch": [wrong, GROUP, 3]}) as server:
        received = await driven(server, num_steps=1)

    assert scores(received) == [1.0]
    assert counted(received)["atropos/refused"] == 2


async def test_transient_failures_are_retried() -> None:
    broken = web.Response(status=503, text="full", headers={"Retry-After": "0"})
    async with serving(broken, batch(1.0), web.Response(status=502), batch(2.0)) as server:
        received = await driven(server)

    assert scores(received) == [1.0, 2.0]
    assert counted(received)["atropos/retries"] == 2


async def test_a_server_that_has_answered_is_waited_for_beyond_the_attempts() -> None:
    received: list[Driven[TrajectoryGroup]] = []
    async with serving(batch(1.0), batch(2.0)) as server:
        server.stops_after = 1
        with capture_logs() as events:
            async with anyio.create_task_group() as tasks:

                async def drive() -> None:
                    received.append(await driven(server, reconnect_timeout_s=60, batch_timeout_s=0.001))

                tasks.start_soon(drive)
                await server.stopped.wait()
                while sum(event["event"] == "request_retried" for event in events) < 2:
                    await checkpoint()
                await server.listen(int(server.url.rpartition(":")[2]))

    assert scores(received[0]) == [1.0, 2.0]
    assert counted(received[0])["atropos/retries"] >= 2


@pytest.mark.parametrize("status", [502, 504])
async def test_a_proxy_without_its_server_counts_as_unreachable(status: int) -> None:
    async with serving(batch(1.0)) as server:
        server.refuses["/batch"] = web.Response(status=status)
        with capture_logs() as events:

            async def find() -> None:
                while sum(event["event"] == "request_retried" for event in events) < 4:
                    await checkpoint()
                del server.refuses["/batch"]

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(find)
                assert scores(await driven(server, reconnect_timeout_s=60, num_steps=1)) == [1.0]


async def test_a_server_that_does_not_return_in_time_is_an_error() -> None:
    async with serving(batch(1.0)) as server:
        server.stops_after = 1
        error = await failure(server.url, reconnect_timeout_s=0.02)

    assert error.situation == "refused"
    assert "GET" in error.summary
    assert "(attempt" in error.summary


# -- leases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A sink that ends groups when all of them are there, and notes what was acknowledged until then."""

    server: Server
    groups: int
    before: list[list[Any]]

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        held = [await inbox.receive() for _ in range(self.groups)]
        self.before.append([*self.server.acknowledged])
        for one in held:
            drop(one, "filtered", "enough")
        async for _ in inbox:
            pass


async def test_a_lease_is_acknowledged_when_all_of_its_batch_has_ended_and_the_source_waits_for_that() -> None:
    before: list[list[Any]] = []
    async with serving(batch(1.0, 2.0, lease="a"), batch(3.0, lease=7)) as server:
        report = await source(client(server.url, lease_s=60)).sink(Held(server, 3, before)).run()

    assert before == [[]]
    assert sorted(server.acknowledged, key=str) == [7, "a"]
    assert "GET /batch?lease_s=60" in server.asked
    assert report.balance.ended["filtered"] == 3
    assert report.balance.balanced


async def test_what_is_lost_with_a_run_is_not_acknowledged() -> None:
    async with serving(batch(1.0, lease="a")) as server, anyio.create_task_group() as tasks:
        outbox, inbox = memory_channel[TrajectoryGroup](1)
        context = Context()
        async with inbox, outbox:
            with entered(context):
                tasks.start_soon(client(server.url).run, outbox)
            group = await inbox.receive()
            context.ledger.admit(group.id, [0])
            while server.polls() < 3:
                await checkpoint()
            tasks.cancel_scope.cancel()

    assert server.acknowledged == []


async def test_an_unknown_lease_is_only_logged() -> None:
    async with serving(batch(1.0, lease="a")) as server:
        server.refuses["/acknowledge"] = web.json_response({"detail": "it expired"}, status=404)
        received = await driven(server, num_steps=1)

    assert scores(received) == [1.0]
    assert counted(received)["atropos/not_acknowledged"] == 1


async def test_a_batch_that_comes_again_is_sent_once_and_acknowledged_by_both_leases() -> None:
    first = batch(1.0, 2.0, lease="a", batch_id="9f.1")
    async with serving(first, first | {"lease": "b"}, batch(3.0, lease="c", batch_id="9f.2")) as server:
        before: list[list[Any]] = []
        report = await source(client(server.url, lease_s=60)).sink(Held(server, 3, before)).run()

    assert before == [[]]
    assert sorted(server.acknowledged) == ["a", "b", "c"]
    assert report.balance.admitted == report.balance.ended["filtered"] == 3


async def test_what_was_trained_before_a_restart_is_not_trained_again_and_is_no_step() -> None:
    answers = [batch(1.0, 2.0, lease=lease, batch_id=f"9f.{number}") for number, lease in enumerate("abc")]
    context = Context()
    context.ledger.restore({GroupId("atropos.0", f"9f.0.{number}"): 1 for number in range(2)}, step=1)
    async with serving(*answers) as server:
        outbox, inbox = memory_channel[TrajectoryGroup](4)
        async with inbox:
            with entered(context):
                await client(server.url).run(outbox)
            names = [group.instance_id async for group in inbox]

    assert names == ["9f.1.0", "9f.1.1", "9f.2.0", "9f.2.1"]
    assert server.acknowledged == ["a", "b", "c"]
    assert context.metrics.emit(1)["atropos/duplicates"] == 1


async def test_groups_of_a_pipeline_reach_another_one_as_they_were_and_are_acknowledged() -> None:
    sent = [group(instance_id=str(number), seed=number, advantages=np.arange(14)) for number in range(4)]
    sink, received = AtroposTrainers(server=ServerConfig(port=0)), list[TrajectoryGroup]()

    async def poll() -> None:
        url = await sink.listening.url()
        received.extend(await drive_source(client(url, batch_size=4, lease_s=60.0)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poll)
        balance = (await drive_sink(sink, sent)).ledger.balance()
        assert balance.ended["trained"] == 8

    for before, after in zip(sent, received, strict=True):
        names = before.columns().keys() - {"policy_versions"}
        assert all(np.array_equal(before.columns()[name], after.columns()[name]) for name in names)


async def polled(session: aiohttp.ClientSession, *, lease_s: str) -> dict[str, Any]:
    """Return a batch, as soon as there is one."""
    while True:
        answer: dict[str, Any] = await (await session.get("/batch", params={"lease_s": lease_s})).json()
        if answer["batch"]:
            return answer


async def test_a_sink_ends_with_the_last_step_though_a_trainer_died_with_a_batch_that_was_counted() -> None:
    """It comes back with one step done of the two that it was handed, and the stream does not end by itself."""
    sink, received = AtroposTrainers(server=ServerConfig(port=0)), list[TrajectoryGroup]()
    outbox, inbox = memory_channel[TrajectoryGroup](4)

    async def trained_one_of_two() -> None:
        url = await sink.listening.url()
        registration = {
            "wandb_group": "",
            "wandb_project": "",
            "batch_size": 2,
            "max_token_len": 64,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 2,
        }
        async with aiohttp.ClientSession(url) as session:
            await session.post("/register", json=registration)
            first = await polled(session, lease_s="60")
            await polled(session, lease_s="0.001")
            await session.post("/acknowledge", json={"lease": first["lease"]})
        received.extend(await drive_source(client(url, batch_size=2, num_steps=2, starting_step=1, lease_s=60.0)))

    context = Context()
    async with inbox, outbox:
        for number in range(3):
            sent = group(instance_id=str(number))
            context.ledger.admit(sent.id, [0, 1])
            await outbox.send(sent)
        with entered(context):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(trained_one_of_two)
                await sink.run(inbox)

    assert len(received) == 1
    assert context.ledger.balance().ended["trained"] == 4


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def answering(behaves: Callable[[anyio.abc.SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    """Listen at a port that answers with other bytes."""

    async def closing(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await behaves(stream)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, closing)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"  # noqa: S610 (of a socket)
        tasks.cancel_scope.cancel()


async def failure(url: str, **changed: Any) -> AtroposAPIError:
    with pytest.raises(AtroposAPIError) as raised:
        await drive_source(client(url, **changed))
    return raised.value


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_refused(host: str) -> None:
    port = free_port()

    error = await failure(f"http://{host}:{port}")

    assert error.situation == "refused"
    assert f"GET http://{host}:{port}/: expected a server, got no connection" in str(error)
    assert "(attempt 2, after" in str(error)
    assert f"(1) is the server running? It is started with `penstock gateway --port {port}`" in str(error)


async def test_timed_out() -> None:
    async with answering(lambda _: anyio.sleep_forever()) as url:
        error = await failure(url, request_timeout_s=0.02)

    assert error.situation == "timed out"
    assert f"GET {url}/: expected an answer within 0.02 s, got none" in str(error)
    assert "ATROPOS_TIMEOUT" in str(error)


async def test_unreachable() -> None:
    error = await failure("http://no-such-host.invalid:8000")

    assert error.situation == "unreachable"
    assert "`getent hosts no-such-host.invalid`" in str(error)


async def test_a_status_of_4xx_is_not_retried() -> None:
    def forbidden() -> web.StreamResponse:
        return web.json_response({"detail": "expected a token"}, status=401)

    async with serving(greeting=forbidden) as server:
        error = await failure(server.url)

    assert error.situation == "rejected"
    assert f"GET {server.url}/: expected an answer, got 401: expected a token. To check: (1)" in str(error)
    assert server.asked == ["GET /"]


async def test_a_status_of_5xx_that_does_not_pass() -> None:
    async with serving(*[web.Response(status=500, text="Internal Server Error") for _ in range(2)]) as server:
        error = await failure(server.url)

    assert error.situation == "failed"
    assert "got 500: Internal Server Error (attempt 2, after" in str(error)
    assert "is a score NaN?" in str(error)


async def test_a_connection_that_breaks_in_the_midst_of_an_answer() -> None:
    async def behaves(stream: anyio.abc.SocketStream) -> None:
        await stream.receive()
        await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

    async with answering(behaves) as url:
        error = await failure(url)

    assert error.situation == "failed"
    assert "expected an answer, got none: ClientPayloadError" in str(error)


@pytest.mark.parametrize("body", ["<html>Welcome</html>", "{", "[1]", "{}", '{"message": NaN}'])
async def test_an_answer_that_is_no_json_of_the_contract(body: str) -> None:
    async with serving(greeting=lambda: web.Response(text=body)) as server:
        error = await failure(server.url)

    assert error.situation == "no JSON"
    assert f"expected the JSON of a RootAnswer, got {body.encode()!r}" in str(error)
    assert server.asked == ["GET /"]


async def test_a_batch_that_is_none() -> None:
    async with serving(web.Response(text='{"batch": [{"tokens":')) as server:
        error = await failure(server.url)

    assert error.situation == "no JSON"
    assert f"GET {server.url}/batch?lease_s=1800: expected the JSON of a BatchAnswer" in str(error)


async def test_a_queue_that_is_empty_for_too_long() -> None:
    async with serving(batch(1.0)) as server:
        error = await failure(server.url, batch_timeout_s=0.02)

    assert error.situation == "empty"
    assert "expected a batch within 0.02 s, got none" in str(error)
    assert server.polls() >= 2


@pytest.mark.parametrize("info", [{"batch_size": -1, "max_token_len": -1}, {"batch_size": 4, "max_token_len": 64}])
async def test_a_registration_that_does_not_count(info: dict[str, Any]) -> None:
    async with serving(info=info) as server:
        error = await failure(server.url)

    assert error.situation == "another trainer"
    assert f"got Info(batch_size={info['batch_size']}," in str(error)
    assert "reset_data" in str(error)


# -- what it needs -----------------------------------------------------------------------------------------------------


async def test_a_token_is_brought_and_not_shown() -> None:
    sink = AtroposTrainers(server=ServerConfig(port=0, token="secret"))  # noqa: S106 (no secret)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive_sink, sink, [group()])
        url = await sink.listening.url()
        in_url = url.replace("http://", "http://anyone:secret@")

        bare = await failure(url)
        (one,) = await drive_source(client(in_url, num_steps=1))

        assert bare.situation == "rejected"
        assert f"POST {url}/register: expected an answer, got 401" in str(bare)
        assert len(one) == 2
        tasks.cancel_scope.cancel()


async def test_a_token_is_not_shown() -> None:
    in_url = f"http://anyone:secret@127.0.0.1:{free_port()}"
    by_name = client("http://a:1", token="secret")  # noqa: S106 (no secret)

    for shown in (client(in_url), by_name, await failure(in_url)):
        assert "secret" not in f"{shown!s} {shown!r}"
    with pytest.raises(ValueError, match="token: expected none beside the one in api_url"):
        client(in_url, token="secret")  # noqa: S106 (no secret)


WITHOUT_AIOHTTP = """
import sys
sys.modules["aiohttp"] = None

import anyio
from penstock.errors import MissingExtra
from penstock.integrations.atropos import AtroposClient
from penstock.testing import drive_source

try:
    anyio.run(drive_source, AtroposClient(batch_size=2, max_token_len=64, num_steps=1))
except MissingExtra as error:
    print(error)
"""


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_AIOHTTP], capture_output=True, text=True, check=True)

    assert ran.stdout.startswith("AtroposClient needs aiohttp")
    assert "[http]" in ran.stdout.partition("pip install ")[2]
