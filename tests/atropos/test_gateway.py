"""The gateway in a pipeline: environments as a source, over HTTP from within this process."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs
from tests.atropos.environment import Config, Environment
from tests.atropos.gateways import environment, scored
from tests.atropos.talking import ANYWHERE, talking
from tests.failsafe import FAILSAFE_S
from tests.fixed_limits import set_limits

from penstock import Context, TrajectoryGroup
from penstock.accounting import Ledger
from penstock.channels import MemoryReceiver, memory_channel
from penstock.errors import InvalidConfig
from penstock.integrations.atropos import AtroposGateway, ServerConfig, ShmTransport
from penstock.testing import drive_source, entered


@asynccontextmanager
async def running(source: AtroposGateway, context: Context) -> AsyncGenerator[MemoryReceiver[TrajectoryGroup]]:
    """Run `source`, and yield a channel of capacity 1 with the groups that it sends."""
    outbox, inbox = memory_channel[TrajectoryGroup](1)

    async def run() -> None:
        with entered(context):
            async with outbox:
                await source.run(outbox)

    async with inbox, anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield inbox
        tasks.cancel_scope.cancel()


async def test_groups_of_an_environment_become_records_and_are_in_the_ledger() -> None:
    source, context = AtroposGateway(batch_size=8, max_token_len=64, server=ANYWHERE), Context()
    context.ledger.step = 7

    async with running(source, context) as inbox, talking(source) as talk:
        env_id = (await talk.post("/register-env", environment("sums")))["env_id"]
        await talk.post("/scored_data", scored(4, env_id, overrides=[{"temperature": 0.5}] * 4))
        in_flight = context.ledger.in_flight
        taken = await inbox.receive()

    assert in_flight == 4
    assert (taken.env, taken.rewards.tolist(), taken.policy_versions.tolist()) == ("sums_0", [0, 1, 2, 3], [7] * 4)
    assert taken.loss_mask.tolist() == [False, True, True] * 4
    assert taken.meta["overrides"][0] == {"temperature": 0.5}


async def test_an_environment_that_knows_nothing_of_penstock_feeds_a_pipeline() -> None:
    source, context = AtroposGateway(batch_size=64, max_token_len=64, server=ANYWHERE), Context()

    groups: list[TrajectoryGroup] = []
    async with running(source, context) as inbox, talking(source) as talk:
        env = Environment(Config(rollout_server_url=talk.url, pace=0.01), groups=6)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(env.env_manager)
            groups = [await inbox.receive() for _ in range(6)]

    assert env.counts.sent == 6
    assert len({group.instance_id for group in groups}) == 6
    assert [group.env for group in groups] == ["counting_0"] * 6
    assert context.ledger.balance().admitted == 24


async def test_groups_through_shared_memory_are_in_the_same_ledger() -> None:
    source, context = AtroposGateway(batch_size=8, max_token_len=64, server=ANYWHERE), Context()

    groups: list[TrajectoryGroup] = []
    async with running(source, context) as inbox, talking(source) as talk:
        env = ShmTransport.attach(Environment(Config(rollout_server_url=talk.url, pace=0.001), groups=3))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(env.env_manager)
            groups = [await inbox.receive() for _ in range(3)]
        (counters,) = (await talk.get("/status"))["environments"]

    assert [len(group) for group in groups] == [4, 4, 4]
    assert [group.env for group in groups] == ["counting_0"] * 3
    assert (counters["name"], counters["submitted"]) == ("counting_0", 12)


async def test_while_the_pipeline_takes_no_groups_the_depth_grows_and_then_groups_get_503() -> None:
    source, context = AtroposGateway(batch_size=4, max_token_len=64, capacity=2, server=ANYWHERE), Context()

    async with running(source, context) as inbox, talking(source) as talk:
        env_id = (await talk.post("/register-env", environment()))["env_id"]
        depths = []
        for mark in range(4):  # one in the channel, one that waits for credit, two in the queue
            await talk.post("/scored_data", scored(4, env_id, mark=10.0 * mark))
            depths.append((await talk.get(f"/status-env?env_id={env_id}"))["self_queue_size"])
        status, refused = await talk.ask("POST", "/scored_data", scored(4, env_id))
        received = [(await inbox.receive()).rewards[0] for _ in range(4)]
        await talk.post("/scored_data", scored(4, env_id))

    assert depths == [1, 2, 3, 4]
    assert status == 503, refused
    assert received == [0.0, 10.0, 20.0, 30.0]
    assert context.ledger.balance().admitted == 20


async def test_a_trainer_is_refused_where_a_pipeline_trains() -> None:
    source = AtroposGateway(batch_size=8, max_token_len=64, server=ANYWHERE)
    requests = [("POST", "/register"), ("GET", "/batch"), ("POST", "/acknowledge"), ("GET", "/reset_data")]

    async with running(source, Context()), talking(source) as talk:
        answers = [await talk.ask(*each) for each in requests]

    assert [status for status, _ in answers] == [409] * 4
    assert "penstock gateway" in answers[0][1]["detail"]


async def test_the_stream_ends_with_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, STEP_POLL_S=0.001)
    source = AtroposGateway(batch_size=8, max_token_len=64, num_steps=3, server=ANYWHERE)
    context = Context(ledger=Ledger())

    async with running(source, context) as inbox, talking(source) as talk:
        await talk.post("/scored_data", scored(4))
        await inbox.receive()
        context.ledger.step = 2
        assert (await talk.get("/status"))["current_step"] == 2
        context.ledger.step = 3
        with pytest.raises(anyio.EndOfStream):
            await inbox.receive()


async def test_groups_that_wait_after_the_last_step_are_unfinished() -> None:
    source = AtroposGateway(batch_size=8, max_token_len=64, num_steps=3, server=ANYWHERE, departure_timeout_s=0.01)
    context = Context(ledger=Ledger())

    async with running(source, context) as inbox, talking(source) as talk:
        for _ in range(5):
            await talk.post("/scored_data", scored(4))
        sent = [await inbox.receive()]
        context.ledger.step = 3
        sent += [group async for group in inbox]

    assert len(sent) < 5
    assert context.ledger.balance().reasons["unfinished"] == {"in flight when the run ended": 4 * (5 - len(sent))}
    assert context.ledger.in_flight == 4 * len(sent)


async def test_after_the_last_step_environments_are_notified_and_their_groups_dropped() -> None:
    source = AtroposGateway(
        batch_size=8, max_token_len=64, num_steps=3, server=ANYWHERE, departure_timeout_s=FAILSAFE_S
    )
    context = Context(ledger=Ledger())

    with capture_logs() as logs:
        async with running(source, context) as inbox, talking(source) as talk:
            first, second = [(await talk.post("/register-env", environment("sums")))["env_id"] for _ in range(2)]
            context.ledger.step = 3
            with pytest.raises(anyio.EndOfStream):
                await inbox.receive()
            answer = await talk.post("/scored_data", scored(4, first))
            status = await talk.get(f"/status-env?env_id={first}")
            refused = (await talk.get("/status"))["refused"]
            await talk.get(f"/status-env?env_id={second}")

    assert (answer["status"], answer["rejected"]) == ("received", ["the run is complete: no more groups are trained"])
    assert refused == {"sums_0": {"RunComplete": 1}}
    assert not [event for event in logs if event["event"] == "refused"]  # an end is no fault
    assert status["current_step"] == 3
    assert status["current_step"] + status["queue_size"] * 4 // 8 > 10**6  # the rule by which an environment stops
    assert context.ledger.balance().admitted == 0


async def test_the_gateway_waits_for_no_environment_that_left_or_beyond_its_bound() -> None:
    for departure_timeout_s, leaves in ((FAILSAFE_S, True), (0.01, False)):
        source = AtroposGateway(
            batch_size=8, max_token_len=64, num_steps=1, server=ANYWHERE, departure_timeout_s=departure_timeout_s
        )
        context = Context(ledger=Ledger())
        async with running(source, context) as inbox, talking(source) as talk:
            await talk.post("/register-env", environment("sums"))
            context.ledger.step = 1
            with pytest.raises(anyio.EndOfStream):
                await inbox.receive()
            if leaves:
                await talk.post("/disconnect-env", {"env_id": 0})


async def test_a_sink_that_returns_with_the_last_step_cuts_no_environment_off() -> None:
    """The pipeline cancels a source whose sink has returned; the gateway stays for the environments."""
    source = AtroposGateway(
        batch_size=8, max_token_len=64, num_steps=1, server=ANYWHERE, departure_timeout_s=FAILSAFE_S
    )
    context = Context(ledger=Ledger())
    outbox, inbox = memory_channel[TrajectoryGroup](1)
    stage = anyio.CancelScope()

    async def run() -> None:
        with stage, entered(context):
            await source.run(outbox)

    async with inbox, outbox, anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        async with talking(source) as talk:
            await talk.post("/register-env", environment("sums"))
            context.ledger.step = 1
            stage.cancel()
            status = await talk.get("/status-env?env_id=0")

            assert status["queue_size"] >= 10**9


async def test_metrics_count_sequences_by_environment() -> None:
    source, context = AtroposGateway(batch_size=8, max_token_len=64, server=ANYWHERE), Context()

    async with running(source, context) as inbox, talking(source) as talk:
        env_id = (await talk.post("/register-env", environment("sums")))["env_id"]
        await talk.post("/scored_data", scored(4, env_id))
        await inbox.receive()
        emitted = [context.metrics.emit(step) for step in (1, 2)]
        status = await talk.get("/status")

    assert [metrics["atropos/sums_0/sequences"] for metrics in emitted] == [4, 0]
    assert status["refused"] == {}


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(
        InvalidConfig, match=r"AtroposGateway\.batch_size: expected a whole number of at least 1, got 0"
    ):
        AtroposGateway(batch_size=0, max_token_len=64)


@pytest.mark.parametrize("heartbeat_timeout_s", [0.0, -1.0, math.nan])
def test_the_heartbeat_timeout_is_a_positive_time(heartbeat_timeout_s: float) -> None:
    with pytest.raises(InvalidConfig, match=r"AtroposGateway\.heartbeat_timeout_s: expected a finite number above 0"):
        AtroposGateway(batch_size=8, max_token_len=64, heartbeat_timeout_s=heartbeat_timeout_s)


async def test_an_environment_times_out_after_the_heartbeat_timeout() -> None:
    source = AtroposGateway(batch_size=8, max_token_len=64, heartbeat_timeout_s=1e-6, server=ANYWHERE)

    async with running(source, Context()), talking(source) as talk:
        for minimum in (0.5, 0.25):
            await talk.post("/register-env", environment(min_batch_allocation=minimum))
        status = await talk.get("/status-env?env_id=1")

    assert status["unallocated_fraction"] == 0.75  # the other timed out


async def test_a_gateway_beyond_loopback_needs_a_token() -> None:
    source = AtroposGateway(batch_size=8, max_token_len=64, server=ServerConfig(host="0.0.0.0", port=0))  # noqa: S104 (refused)

    with pytest.raises(InvalidConfig, match=r"expected a loopback address or a token, got 0\.0\.0\.0 and none"):
        await drive_source(source)


async def test_with_a_token_a_gateway_listens_at_any_address() -> None:
    server = ServerConfig(host="0.0.0.0", port=0, token="a token of this test")  # noqa: S104, S106 (no secret)
    source = AtroposGateway(batch_size=8, max_token_len=64, server=server)

    async with running(source, Context()):
        assert (await source.listening.url()).startswith("http://0.0.0.0:")


WITHOUT_STARLETTE = """
import sys
sys.modules["starlette"] = None

import anyio
from penstock.errors import MissingExtra
from penstock.integrations.atropos import AtroposGateway
from penstock.testing import drive_source

try:
    anyio.run(drive_source, AtroposGateway(batch_size=8, max_token_len=64))
except MissingExtra as error:
    print(error)
"""


def test_a_missing_package_of_the_server_is_named_with_the_command_that_installs_it() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_STARLETTE], capture_output=True, text=True, check=True)

    assert ran.stdout.startswith("AtroposGateway needs starlette")
    assert "[gateway]" in ran.stdout.partition("pip install ")[2]
