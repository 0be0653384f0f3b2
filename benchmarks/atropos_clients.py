"""What client processes of `benchmarks.atropos` send, and how: scored groups, again and again, until told to stop.

Three ways: with the habits of an environment of Atropos (a connection for every request, json, gzip level 9), over a
connection that is kept, and through ShmTransport. All begin with the lists that sampling left.
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
"""Sequences a group."""

KINDS = 2
"""Different groups that a client sends in turn."""

PROMPT_SHARE = 4
"""One token in so many is the prompt's."""

CANDIDATES = 4
"""Of a teacher, at each token but the first, which has none."""

WORKERS = 4
"""Groups that a client has on the way at a time."""

COMPRESSED_FROM_BYTES, COMPRESSION_LEVEL = 1024, 9

ABSENT = ("advantages", "ref_logprobs", "messages", "overrides", "images")
"""Sent empty, as environments do."""

Scored: TypeAlias = dict[str, Any]
Post: TypeAlias = Callable[[Scored], Awaitable[object]]


@dataclass(frozen=True)
class Load:
    """What is sent."""

    tokens: int
    """Of each sequence."""
    distilled: bool = False
    """Whether with a teacher's candidates."""

    def __str__(self) -> str:
        return f"{GROUP} × {self.tokens:,} tokens{', distillation' if self.distilled else ''}"

    def groups(self, client: int) -> list[Scored]:
        """What a client sends in turn."""
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
"""Opens a client's way to the server at a URL, for an environment of this id: an async context manager of `Post`."""


@asynccontextmanager
async def as_atropos(url: str, env_id: int) -> AsyncIterator[Post]:
    """As an environment of Atropos."""

    async def post(scored: Scored) -> None:
        body, headers = json.dumps(scored | {"env_id": env_id}).encode(), {"Content-Type": "application/json"}
        if len(body) >= COMPRESSED_FROM_BYTES:
            body, headers["Content-Encoding"] = gzip.compress(body, COMPRESSION_LEVEL), "gzip"
        async with aiohttp.ClientSession() as session:
            await _posted(session, url, body, headers)

    yield post


@asynccontextmanager
async def kept(url: str, env_id: int) -> AsyncIterator[Post]:
    """Over connections that are kept, JSON as msgspec writes it."""
    async with aiohttp.ClientSession() as session:

        async def post(scored: Scored) -> None:
            body = msgspec.json.encode(scored | {"env_id": env_id})
            await _posted(session, url, body, {"Content-Type": "application/json"})

        yield post


@asynccontextmanager
async def by_shm(url: str, env_id: int) -> AsyncIterator[Post]:
    """Through shared memory."""

    async def refuse(_: Any) -> None:
        raise RuntimeError("expected a way through shared memory, got none")

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
            full_for_s = float(response.headers.get("Retry-After", 1))
        await asyncio.sleep(full_for_s)


def send(client: Client, url: str, load: Load, number: int, control: Control) -> None:
    """A client's process."""
    asyncio.run(_send(client, url, load, number, control))


async def _send(client: Client, url: str, load: Load, number: int, control: Control) -> None:
    groups, env_id = itertools.cycle(load.groups(number)), await _registered(url, load)
    async with client(url, env_id) as post:

        async def work() -> None:
            while not control.stopping:
                await post(next(groups))

        await asyncio.gather(*(work() for _ in range(WORKERS)))


async def _registered(url: str, load: Load) -> int:
    """The id of a new environment; it is asked for until there is a trainer."""
    asked = {"max_token_length": load.tokens + 1, "desired_name": "bench", "weight": 1.0, "group_size": GROUP}
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{url}/register-env", json=asked) as response:
                answer = await response.json()
            if answer["status"] == "success":
                env_id: int = answer["env_id"]
                return env_id
            await asyncio.sleep(0.1)
