from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import numpy as np
import pytest
from aiohttp import web
from tests.atropos.environment import Config, Environment, Scored, scored_group
from tests.failsafe import FAILSAFE_S

from penstock import TrajectoryGroup
from penstock._stages.integrations.atropos import submitter
from penstock._stages.integrations.atropos.contract import scored_data
from penstock._stages.integrations.atropos.server.shm_receiver import ShmReceiver, open_receiver
from penstock._stages.integrations.atropos.translation import to_group
from penstock.channels import RemoteSender
from penstock.errors import NobodyListens
from penstock.integrations.atropos import GatewayDisconnected, ShmTransport, submitting

ENV_ID = 3


@dataclass
class Server:
    """An HTTP server for environments: its answer to /shm, and the bodies that were posted."""

    shm_url: str | None = None
    """The answer of /shm; None for a server without this endpoint."""
    asked: int = 0
    """Requests for /shm so far."""
    posted: list[tuple[str, Any]] = field(default_factory=list)
    url: str = ""

    async def greet(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "AtroposLib API"})

    async def shm(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"url": self.shm_url} if self.shm_url else {"detail": "Not Found"}, status=self.status)

    @property
    def status(self) -> int:
        return 200 if self.shm_url else 404

    async def receive(self, request: web.Request) -> web.Response:
        self.posted.append((request.path, await request.json()))  # inflated by aiohttp
        return web.json_response({"status": "received"})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    application = web.Application()
    application.router.add_get("/", server.greet)
    application.router.add_get("/shm", server.shm)
    application.router.add_post("/scored_data", server.receive)
    application.router.add_post("/scored_data_list", server.receive)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def gateway(**bounds: int) -> AsyncIterator[tuple[Server, ShmReceiver]]:
    async with open_receiver(**bounds) as receiver, serving(Server(receiver.url)) as server:
        yield server, receiver


@asynccontextmanager
async def registered(server: Server, kind: type[Environment] = Environment) -> AsyncIterator[Environment]:
    """Yield a registered environment, and close it as at the end of its process."""
    env = ShmTransport.attach(kind(Config(rollout_server_url=server.url, pace=0.001), env_id=ENV_ID, curr_step=7))
    try:
        yield env
    finally:
        if (keeper := connection_of(env)._task) is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


def connection_of(env: Environment) -> submitter._ShmConnection:
    return submitter._connection_of(env)


def sender_of(env: Environment) -> RemoteSender[TrajectoryGroup] | None:
    """Return the channel's sending end, while it is open."""
    opened = connection_of(env)._opened
    return opened.result()._sender._sender if opened is not None and opened.done() else None


async def send(env: Environment, *scored: Scored) -> None:
    for each in scored:
        await env._send_scored_data_to_api(each)


async def received(receiver: ShmReceiver, count: int) -> list[tuple[int | None, TrajectoryGroup]]:
    groups: list[tuple[int | None, TrajectoryGroup]] = []
    with anyio.fail_after(FAILSAFE_S):
        async for env_id, group in receiver:
            groups.append((env_id, group.owned()))
            if len(groups) == count:
                break
    return groups


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a socket brings."""
    with anyio.fail_after(FAILSAFE_S):
        while not holds():  # noqa: ASYNC110 (there is no event)
            await asyncio.sleep(0)


def rewards(groups: list[tuple[int | None, TrajectoryGroup]]) -> list[list[float]]:
    return [group.rewards.tolist() for _, group in groups]


def expected(*items: int) -> list[list[float]]:
    return [np.array(scored_group(item)["scores"], np.float32).tolist() for item in items]


def complete_group() -> Scored:
    """Return a group with every field."""
    plain = scored_group(5, group_size=2, tokens=6)
    return plain | {
        "advantages": [[0.1, -0.2, 0.3, 0.4, -0.5, 0.6]] * 2,
        "ref_logprobs": [[-0.1] * 6, [-0.7] * 6],
        "messages": [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}] for text in "45"],
        "generation_params": {"temperature": 0.7, "stop": ["</s>"]},
        "overrides": [{"set_advantage_to_zero": True}, {}],
        "group_overrides": {"group_size": 2},
        "images": ["file:///a.png", None],
        "distill_token_ids": [[[], [3, 9], [4], [5, 6, 7], [8], [1]]] * 2,
        "distill_logprobs": [[[], [-0.5, -1.5], [-0.1], [-1.0, -2.0, -3.0], [-0.2], [-4.0]]] * 2,
    }


async def test_everything_that_an_environment_sends_arrives_bit_for_bit() -> None:
    scored = complete_group()
    async with gateway() as (server, receiver), registered(server) as env:
        await send(env, scored)
        [(env_id, group)] = await received(receiver, 1)

    same = to_group(
        scored_data(scored | {"env_id": ENV_ID}), env="counting", instance_id=group.instance_id, policy_version=7
    )
    assert env_id == ENV_ID
    assert group.header() == same.header()
    assert group.columns().keys() == same.columns().keys() >= {"teacher_ids", "advantages", "ref_logprobs"}
    for name, column in group.columns().items():
        assert column.dtype == same.columns()[name].dtype
        assert column.tobytes() == same.columns()[name].tobytes()
    assert not server.posted


async def test_instance_ids_are_unique_among_senders() -> None:
    async with gateway() as (server, receiver), registered(server) as one, registered(server) as other:
        await send(one, scored_group(0), scored_group(0))
        await send(other, scored_group(0))
        groups = await received(receiver, 3)

    assert len({group.id for _, group in groups}) == 3


async def test_a_list_of_groups_arrives_in_order() -> None:
    async with gateway() as (server, receiver), registered(server) as env:
        await env._send_scored_data_to_api([scored_group(item) for item in range(3)])
        groups = await received(receiver, 3)

    assert rewards(groups) == expected(0, 1, 2)


class Mixed(ShmTransport, Environment):
    pass


async def test_mixed_in_before_an_environment_it_sends() -> None:
    async with gateway() as (server, receiver), registered(server, Mixed) as env:
        await send(env, scored_group(1))
        groups = await received(receiver, 1)

    assert rewards(groups) == expected(1)
    assert not server.posted


def test_mixed_in_behind_an_environment_it_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected class Wrong\(ShmTransport, Environment\)"):

        class Wrong(Environment, ShmTransport):
            pass


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected an environment of Atropos.*got a dict"):
        ShmTransport.attach({})


async def test_nothing_is_opened_before_the_first_group() -> None:
    async with gateway() as (server, _), registered(server):
        await anyio.wait_all_tasks_blocked()

        assert server.asked == 0


async def test_a_cleanup_after_every_group_and_a_worker_that_is_cancelled_take_nothing_down() -> None:
    async with gateway() as (server, receiver), registered(server) as env:
        env.server_max_token_len = 100
        await env.handle_env(0)
        for _ in range(2):
            worker = asyncio.create_task(env.handle_env(1))
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        await env.handle_env(2)
        groups = await received(receiver, 2)

    assert env.counts.cleanups == 2
    assert rewards(groups) == expected(0, 2)
    assert server.asked == 1


async def test_the_worker_that_opens_it_may_be_cancelled_while_others_wait_for_it() -> None:
    async with gateway() as (server, receiver), registered(server) as env:
        first, second = (asyncio.create_task(send(env, scored_group(item))) for item in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        groups = await received(receiver, 1)

    assert rewards(groups) == expected(1)


async def test_a_gateway_that_takes_nothing_slows_the_environment_down_and_nothing_is_lost() -> None:
    async with gateway(capacity=2) as (server, receiver), registered(server) as env:
        sending = asyncio.create_task(send(env, *map(scored_group, range(5))))
        await until(lambda: sender_of(env) is not None)
        sender = sender_of(env)
        assert sender is not None
        await until(lambda: sender.statistics().waiting_for == "credit")
        sent = sender.statistics().sent
        groups = await received(receiver, 5)
        await sending

    assert sent == 2
    assert rewards(groups) == expected(0, 1, 2, 3, 4)


async def test_the_gateway_knows_how_much_of_each_environment_waits() -> None:
    async with gateway(capacity=4) as (server, receiver), registered(server) as env:
        await send(env, *map(scored_group, range(3)))
        await received(receiver, 1)
        await until(lambda: receiver.waiting(ENV_ID) == 2)

        assert receiver.waiting(ENV_ID + 1) == 0


async def test_a_server_that_is_no_gateway_gets_everything_over_http_after_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(Server()) as server, registered(server) as env:
        await send(env, scored_group(0))
        await env._send_scored_data_to_api([scored_group(1), scored_group(2)])

    assert [path for path, _ in server.posted] == ["/scored_data", "/scored_data_list"]
    assert server.posted[0][1] == scored_group(0, env_id=ENV_ID)
    assert server.asked == 1
    assert caplog.text.count("sending_over_http") == len(caplog.records) == 1
    assert "the server is no gateway of penstock" in caplog.text


async def test_a_gateway_on_another_host_gets_everything_over_http_after_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    async with serving(Server(f"shm://{tmp_path}")) as server, registered(server) as env:
        await send(env, scored_group(0), scored_group(1))

    assert len(server.posted) == 2
    assert caplog.text.count("sending_over_http") == len(caplog.records) == 1
    assert "on another host" in caplog.text


async def test_a_gateway_without_memory_for_one_more_gets_everything_over_http() -> None:
    async with (
        gateway(max_environments=1) as (server, receiver),
        registered(server) as one,
        registered(server) as another,
    ):
        await send(one, scored_group(0))
        await send(another, scored_group(1))
        groups = await received(receiver, 1)

    assert rewards(groups) == expected(0)
    assert [scored["scores"] for _, scored in server.posted] == [scored_group(1)["scores"]]


async def test_a_group_that_no_channel_holds_goes_over_http_and_the_next_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway(capacity_bytes=2**14) as (server, receiver), registered(server) as env:
        await send(env, scored_group(0, tokens=3000), scored_group(1))
        groups = await received(receiver, 1)

    assert [path for path, _ in server.posted] == ["/scored_data"]
    assert rewards(groups) == expected(1)
    assert "raise capacity_bytes" in caplog.text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"masks": [[1]]}, "masks: expected lists of"),
        ({"overrides": [None, {}, {}, {}]}, "expected `object`, got `null` - at `$.overrides[0]`"),
        ({"generation_params": ["x"]}, "at `$.generation_params`"),
    ],
)
async def test_an_invalid_group_is_sent_over_http_for_the_gateway_to_refuse(
    changed: Scored, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = scored_group(0) | changed
    async with gateway() as (server, _), registered(server) as env:
        await send(env, wrong)

    assert server.posted == [("/scored_data", wrong | {"env_id": ENV_ID})]
    assert message in caplog.text


async def test_an_environment_without_an_id_sends_without_one() -> None:
    class Bare:
        """Has not come so far as to have an `env_id`."""

        def __init__(self, config: Config, **_: Any) -> None:
            self.config = config

        _send_scored_data_to_api = Environment._send_scored_data_to_api

    async with gateway() as (server, receiver), registered(server, cast("type[Environment]", Bare)) as env:
        await send(env, scored_group(0))
        [(env_id, _)] = await received(receiver, 1)

    assert env_id is None


async def test_the_connection_is_reopened_after_a_restart_of_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Server()) as server, registered(server) as env:
        async with open_receiver() as receiver:
            server.shm_url = receiver.url
            await send(env, scored_group(0))
            before = await received(receiver, 1)
        async with open_receiver() as receiver:
            server.shm_url = receiver.url
            await send(env, scored_group(1))
            after = await received(receiver, 1)

    assert rewards(before + after) == expected(0, 1)
    assert not server.posted
    assert "gateway_disconnected" in caplog.text


async def test_when_a_gateway_disconnects_the_groups_in_transit_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Server()) as server, registered(server) as env:
        async with open_receiver() as receiver:
            server.shm_url = receiver.url
            await send(env, scored_group(0), scored_group(1), scored_group(2))
            await received(receiver, 1)
            sender = sender_of(env)
            assert sender is not None
            await until(lambda: sender.statistics().items == 2)
        await until(lambda: "gateway_disconnected" in caplog.text)

    assert "groups_in_transit=2" in caplog.text


async def test_groups_that_are_lost_with_their_gateway_are_an_error_of_the_sender() -> None:
    async def submit_to_one_that_goes(server: Server, receiver: ShmReceiver) -> None:
        async with submitting(server.url) as submit_to:
            await submit_to([scored_group(0), scored_group(1)])
            await received(receiver, 1)
            await receiver._inbox.aclose()

    async with gateway() as (server, receiver):
        with pytest.raises(GatewayDisconnected, match=r"got \d that it may not have received when it disconnected"):
            await submit_to_one_that_goes(server, receiver)


async def test_a_gateway_that_does_not_return_is_named_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway() as (server, receiver), registered(server) as env:
        await send(env, scored_group(0))
        await received(receiver, 1)
        await receiver._inbox.aclose()
        monkeypatch.setattr(submitter, "SHM_RECONNECT_TIMEOUT_S", 0.02)

        with pytest.raises(NobodyListens, match=rf"expected the gateway at {server.url} to return"):
            await send(env, scored_group(1))

    assert not server.posted
