"""A client of a stage that listens, within the event loop in which it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
from tests.failsafe import FAILSAFE_S

from penstock.integrations.atropos import AtroposGateway, AtroposTrainers, ServerConfig

ANYWHERE = ServerConfig(port=0)


class Talk:
    """A client within this event loop."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.request(method, self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        status, answer = await self.ask("GET", path)
        assert status == 200, answer
        return answer

    async def post(self, path: str, body: Any) -> Any:
        status, answer = await self.ask("POST", path, body)
        assert status == 200, answer
        return answer


@asynccontextmanager
async def talking(stage: AtroposGateway | AtroposTrainers) -> AsyncGenerator[Talk]:
    """Yield a client of a stage that is about to listen."""
    async with aiohttp.ClientSession() as session:
        with anyio.fail_after(FAILSAFE_S):
            yield Talk(await stage.listening.url(), session)
