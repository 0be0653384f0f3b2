"""Stands in for Atropos' module of this name where that is not installed: the base of servers, which retries."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


class APIServer:
    """Has the methods that environments call."""

    def __init__(self, config: Any, reasoning_config: Any = None) -> None:
        self.config = config
        self.reasoning_config = reasoning_config

    async def chat_completion(self, **call: Any) -> Any:
        return await self._retried(self._chat_completion_wrapper, call)

    async def completion(self, **call: Any) -> Any:
        return await self._retried(self._completion_wrapper, call)

    async def tokens_and_logprobs_completion(self, **call: Any) -> Any:
        return await self._retried(self._tokens_and_logprobs_completion_wrapper, call)

    async def get_logprobs(self, **call: Any) -> Any:
        return await self._retried(self._get_logprobs_wrapper, call)

    async def _retried(self, function: Callable[..., Awaitable[Any]], call: dict[str, Any]) -> Any:
        for _ in range(3):
            try:
                return await function(**call)
            except Exception:  # noqa: BLE001, S112 (as the original does)
                continue
        raise RuntimeError("RetryError")

    async def _chat_completion_wrapper(self, **_: Any) -> Any: ...

    async def _completion_wrapper(self, **_: Any) -> Any: ...

    async def _tokens_and_logprobs_completion_wrapper(self, **_: Any) -> Any: ...

    async def _get_logprobs_wrapper(self, **_: Any) -> Any: ...
