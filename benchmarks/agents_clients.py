"""Conversations with the endpoint over HTTP, for `benchmarks.agents`: requested on stdin, a line each."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import aiohttp
import anyio


async def _serve() -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        anyio.create_task_group() as tasks,
    ):
        async for line in anyio.wrap_file(sys.stdin):
            url, turns, said, following = json.loads(line)
            tasks.start_soon(_converse, session, url, turns, said, following)


async def _converse(session: aiohttp.ClientSession, url: str, turns: int, said: list[Any], following: Any) -> None:
    latencies = []
    for _ in range(turns):
        began = time.perf_counter()
        async with session.post(f"{url}/chat/completions", json={"messages": said}) as came:
            answer = await came.json()
        latencies.append(time.perf_counter() - began)
        said += [answer["choices"][0]["message"], following]
    print(json.dumps([url, latencies]), flush=True)


if __name__ == "__main__":
    anyio.run(_serve)
