"""A connection that loses answers, for the clients of OpenAI and Anthropic, which repeat their requests then."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from itertools import count
from typing import Any


@asynccontextmanager
async def losing_transport(lost: list[int]) -> AsyncGenerator[Any]:
    """Yield a client of HTTP that loses every second answer, after it has arrived, and adds its number to `lost`."""
    httpx: Any = import_module("httpx2")
    inner, numbers = httpx.AsyncHTTPTransport(), count()

    async def answer_of(request: Any) -> Any:
        answer = await inner.handle_async_request(request)
        if (number := next(numbers)) % 2:
            return answer
        await answer.aread()
        await answer.aclose()
        lost.append(number)
        raise httpx.ReadError("lost", request=request)

    transport = httpx.MockTransport(answer_of)
    async with inner, httpx.AsyncClient(transport=transport) as client:
        yield client
