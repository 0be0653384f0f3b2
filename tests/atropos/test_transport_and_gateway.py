"""ShmTransport in environments as they are, registered with a gateway that feeds a pipeline."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from subprocess import PIPE
from typing import Any

import anyio
import pytest
from anyio.abc import Process
from tests.atropos.environment import Config, Environment, scored_group
from tests.failsafe import FAILSAFE_S
from tests.faults.zygote import ROOT, environment

from penstock import GroupId, ReceiveChannel, TrajectoryGroup, current, source
from penstock.integrations.atropos import AtroposGateway, ServerConfig, ShmTransport

BATCH = 16
TOKEN = "s3cret"  # noqa: S105 (of a gateway that lives as long as a test)

CAPACITY = 16
"""Groups that the connection of one environment through shared memory may hold."""


@dataclass(eq=False)
class Trains:
    """A sink that trains what comes, unless it stands still."""

    goes_on: anyio.Event = field(default_factory=anyio.Event)
    by_env: Counter[int] = field(default_factory=Counter)
    """Number of groups by environment."""
    seen: set[GroupId] = field(default_factory=set)
    arrived: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            await self.goes_on.wait()
            self.by_env[group.meta["env_id"]] += 1
            self.seen.add(group.id)
            current().ledger.end(group, "trained")
            self.arrived.set()
            self.arrived = anyio.Event()

    async def has(self, env_id: int, groups: int) -> None:
        while self.by_env[env_id] < groups:
            await self.arrived.wait()


@dataclass(eq=False)
class Keeps:
    """A sink that keeps what comes."""

    groups: list[TrajectoryGroup] = field(default_factory=list)
    arrived: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        async for group in inbox:
            self.groups.append(group.owned())
            current().ledger.end(group, "trained")
            self.arrived.set()
            self.arrived = anyio.Event()

    async def has(self, groups: int) -> None:
        while len(self.groups) < groups:
            await self.arrived.wait()


@asynccontextmanager
async def training(sink: Trains | Keeps, candidates: int | None = None, **config: Any) -> AsyncIterator[str]:
    """Run a pipeline that environments feed, and yield its URL."""
    gateway = AtroposGateway(
        batch_size=BATCH, max_token_len=100, server=ServerConfig(port=0, **config), candidates=candidates
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source(gateway).sink(sink).run)
        with anyio.fail_after(FAILSAFE_S):
            yield await gateway.listening.url()
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def running(url: str, groups: int) -> AsyncIterator[Process]:
    """Run an environment in a process of its own."""
    options = ["--url", url, "--groups", str(groups), "--pace", "0.01", "--shm"]
    command = [sys.executable, "-m", "tests.atropos.environment", *options]
    async with await anyio.open_process(command, env=environment(), cwd=ROOT, stdout=PIPE, stderr=None) as process:
        yield process


async def counts(process: Process) -> dict[str, int]:
    """Return what it prints at its end."""
    assert process.stdout is not None
    printed = b"".join([chunk async for chunk in process.stdout])
    assert await process.wait() == 0
    counted: dict[str, int] = json.loads(printed)
    return counted


async def test_of_two_environment_processes_one_is_killed_and_takes_nothing_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Trains()
    sink.goes_on.set()
    async with training(sink) as url, running(url, groups=10**6) as victim:
        await sink.has(0, 5)
        async with running(url, groups=12) as other:
            await sink.has(1, 5)
            victim.kill()
            counted = await counts(other)
            await sink.has(1, 12)

    assert (counted["sent"], counted["refused"], counted["dropped"], counted["cleanups"]) == (12, 0, 0, 12)
    assert sink.by_env[1] == 12
    assert len(sink.seen) == sink.by_env.total()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["peer_lost", "environment_lost"]


async def test_a_token_in_the_url_gives_access_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    sink = Trains()
    sink.goes_on.set()
    async with training(sink, token=TOKEN) as url:
        env = ShmTransport.attach(Environment(Config(rollout_server_url=url.replace("//", f"//me:{TOKEN}@")), groups=1))
        await env.register_env()
        await env._send_scored_data_to_api(scored_group(0))
        await sink.has(0, 1)
        shown = repr(vars(env)["_penstock_connection"]._opened.result())
    with anyio.fail_after(FAILSAFE_S):
        while "gateway_unreachable" not in caplog.text:  # noqa: ASYNC110 (there is no event)
            await anyio.sleep(0.001)

    assert "http://127.0.0.1" in shown
    assert "gateway_disconnected" in caplog.text
    assert TOKEN not in caplog.text + shown


async def test_flow_control_counts_what_came_through_shared_memory() -> None:
    sink = Trains()
    async with training(sink) as url:
        env = ShmTransport.attach(Environment(Config(rollout_server_url=url, pace=0.05), groups=100))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(env.env_manager)
            while env.counts.pauses < 3:  # noqa: ASYNC110 (there is no event)
                await anyio.sleep(0.001)
            most = env.config.max_batches_offpolicy * BATCH // env.config.group_size
            assert most <= env.counts.sent <= most + env.config.max_num_workers + CAPACITY
            sink.goes_on.set()
        await sink.has(0, 100)

    assert env.counts.dropped == 0
    assert sink.by_env == {0: 100}


@pytest.mark.parametrize("width", [None, 2, 3, 4])
async def test_a_group_becomes_the_same_by_either_way(width: int | None) -> None:
    sink = Keeps()
    scored = scored_group(0, group_size=1, tokens=3) | {
        "distill_token_ids": [[[], [9, 4], [8, 2, 5]]],
        "distill_logprobs": [[[], [-0.5, -1.0], [-3.0, -1.0, -2.0]]],
    }
    async with training(sink, candidates=width) as url:
        by_http = Environment(Config(rollout_server_url=url, group_size=1))
        await by_http.register_env()
        by_shm = ShmTransport.attach(Environment(Config(rollout_server_url=url), env_id=by_http.env_id, curr_step=500))
        for sent, env in enumerate((by_http, by_shm), 1):
            await env._send_scored_data_to_api(dict(scored))
            await sink.has(sent)

    one, other = sink.groups
    assert (other.env, other.meta) == (one.env, one.meta)
    assert other.policy_versions.tolist() == one.policy_versions.tolist() == [0]
    assert other.columns().keys() == one.columns().keys()
    for name, column in one.columns().items():
        assert column.tolist() == other.columns()[name].tolist(), name
    assert one.teacher_ids is not None
    assert one.teacher_ids.shape == (3, width or 3)


async def test_groups_larger_than_the_shared_memory_arrive_over_http(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = Keeps()
    async with training(sink, shm_bytes=2**14) as url:
        env = ShmTransport.attach(Environment(Config(rollout_server_url=url)))
        await env.register_env()
        for sent, tokens in enumerate((24, 3000), 1):
            await env._send_scored_data_to_api(scored_group(0, tokens=tokens))
            await sink.has(sent)

    assert caplog.text.count("group_sent_over_http") == 1
