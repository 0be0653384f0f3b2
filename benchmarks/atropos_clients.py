"""The client processes of `benchmarks.atropos`, which send scored groups repeatedly until they are stopped.

Three ways: like an environment of Atropos (a connection for every request, json, gzip level 9), over a kept
connection, and through ShmTransport. All begin with lists of Python numbers.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, TypeAlias

import aiohttp
import msgspec

from penstock.integrations.atropos import ShmTransport

from .contestants.harness import Control

__all__ = ["GROUP", "Client", "Load", "as_atropos", "by_shm", "kept", "send"]

GROUP = 8
"""Sequences of a group."""

KINDS = 2
"""Different groups that a client sends in turn."""

PROMPT_SHARE = 4
"""One of so many tokens belongs to the prompt."""

CANDIDATES = 4
"""Candidates of a teacher, at each token but the first."""

WORKERS = 4
"""Groups that a client sends concurrently."""

COMPRESSED_FROM_BYTES, COMPRESSION_LEVEL = 1024, 9

ABSENT = ("advantages", "ref_logprobs", "messages", "overrides", "images")
"""Sent empty, as environments do."""

Scored: TypeAlias = dict[str, Any]
Post: TypeAlias = Callable[[Scored], Awaitable[object]]


@dataclass(frozen=True)
class Load:
    """The groups that are sent."""

    tokens: int
    """Tokens of each sequence."""
    distilled: bool = False
    """True if rows have candidates of a teacher."""

    def __str__(self) -> str:
        return f"{GROUP} × {self.tokens:,} tokens{', distillation' if self.distilled else ''}"

    def groups(self, client: int) -> list[Scored]:
        """Return the groups that a client sends in turn."""
        return [self._group(random.Random(client * KINDS + kind)) for kind in range(KINDS)]  # noqa: S311 (no secrets)

    def _group(self, draw: random.Random) -> Scored:
        prompt, length = self.tokens // PROMPT_SHARE, self.tokens
        rows = [[draw.randrange(128_000) for _ in range(length)] for _ in range(GROUP)]
        group = {
            "tokens": rows,
            "masks": [[-100] * prompt + row[prompt:] for row in rows],
            "scores": [draw.random() for _ in rows],
            "inference_logprobs": [[1.0] * prompt + [-draw.random() for _ in range(length - prompt)] for _ in rows],
            **{name: [] for name in ABSENT},
            "group_overrides": {},
        }
        if self.distilled:
            after_first = range(1, length)
            group["distill_token_ids"] = [
                [[], *(draw.sample(range(128_000), CANDIDATES) for _ in after_first)] for _ in rows
            ]
            group["distill_logprobs"] = [
                [[], *([-draw.random() for _ in range(CANDIDATES)] for _ in after_first)] for _ in rows
            ]
        return group


Client: TypeAlias = Callable[[str, int], Any]
"""Connects a client to the server at a URL, for an environment of this id: an async context manager of `Post`."""


@asynccontextmanager
async def as_atropos(url: str, env_id: int) -> AsyncIterator[Post]:
    """Send like an environment of Atropos."""

    async def post(scored: Scored) -> None:
        body, headers = json.dumps(scored | {"env_id": env_id}).encode(), {"Content-Type": "application/json"}
        if len(body) >= COMPRESSED_FROM_BYTES:
            body, headers["Content-Encoding"] = gzip.compress(body, COMPRESSION_LEVEL), "gzip"
        async with aiohttp.ClientSession() as session:
            await _posted(session, url, body, headers)

    yield post


@asynccontextmanager
async def kept(url: str, env_id: int) -> AsyncIterator[Post]:
    """Send over kept connections, with JSON by msgspec."""
    async with aiohttp.ClientSession() as session:

        async def post(scored: Scored) -> None:
            body = msgspec.json.encode(scored | {"env_id": env_id})
            await _posted(session, url, body, {"Content-Type": "application/json"})

        yield post


@asynccontextmanager
async def by_shm(url: str, env_id: int) -> AsyncIterator[Post]:
    """Send through shared memory."""

    async def refuse(_: Any) -> None:
        raise RuntimeError("expected shared memory, got none")

    config = SimpleNamespace(rollout_server_url=url, wandb_name="bench")
    env = SimpleNamespace(config=config, env_id=env_id, curr_step=0, _send_scored_data_to_api=refuse)
    yield ShmTransport.attach(env)._send_scored_data_to_api  # noqa: SLF001 (the hook of environments)


async def _posted(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> None:
    while True:
        async with session.post(f"{url}/scored_data", data=body, headers=headers) as response:
            if response.status == HTTPStatus.OK:
                await response.read()
                return
            if response.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            retry_after_s = float(response.headers.get("Retry-After", 1))
        await asyncio.sleep(retry_after_s)


def send(client: Client, url: str, load: Load, number: int, control: Control) -> None:
    """Run a client process."""
    asyncio.run(_send(client, url, load, number, control))


async def _send(client: Client, url: str, load: Load, number: int, control: Control) -> None:
    groups, env_id = itertools.cycle(load.groups(number)), await _register(url, load)
    async with client(url, env_id) as post:

        async def work() -> None:
            while not control.stopping:
                await post(next(groups))

        await asyncio.gather(*(work() for _ in range(WORKERS)))


async def _register(url: str, load: Load) -> int:
    """Register a new environment and return its id; retry until there is a trainer."""
    fields = {"max_token_length": load.tokens + 1, "desired_name": "bench", "weight": 1.0, "group_size": GROUP}
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{url}/register-env", json=fields) as response:
                reply = await response.json()
            if reply["status"] == "success":
                env_id: int = reply["env_id"]
                return env_id
            await asyncio.sleep(0.1)
