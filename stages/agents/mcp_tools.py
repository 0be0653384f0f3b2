"""`MCPTools`: the tools of a server of the Model Context Protocol, for an agent on the event loop. Extra `mcp`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.util.exception_groups import single_exception
from ..._pipeline.util.extras import extra
from ..._pipeline.util.user_code import await_user

MOST_IDLE = 64
"""Connections to a server by HTTP that are kept between calls."""


class MCPTools:
    """Lists and calls the tools of a server, within the `async with`; a server that is a command ends with it.

        async with MCPTools(command=["python", "shop.py"]) as tools:
            said = await client.chat(messages, tools=tools.definitions)
            messages += [said, *await tools.results(said)]

    Calls at once share the connections of one `async with`.

    Raises, on entering:
        MissingExtra: the package `mcp` is not installed.
        ConnectionError: no server answers; the message has its command or URL, and the reason.
    """

    def __init__(self, *, command: Sequence[str | Path] = (), url: str = "") -> None:
        """Name the server: either a command that speaks over its standard streams, or a URL.

        Raises:
            InvalidConfig: neither is given, or both.
        """
        if bool(command) == bool(url) or isinstance(command, str):
            raise InvalidConfig(f"MCPTools.command: expected either it or url, got {command!r} and {url!r}")
        self._command = [str(each) for each in command]
        self._url = url
        self._stack = AsyncExitStack()
        self._session: Any = None
        self._refused: type[Exception] = Exception
        self.definitions: list[dict[str, Any]] = []
        """The tools as `AgentClient.chat` and OpenAI's API take them."""

    def __repr__(self) -> str:
        names = [each["function"]["name"] for each in self.definitions]
        return f"<MCPTools of {self._url or self._command[0]}: {', '.join(names) or 'not connected'}>"

    async def __aenter__(self) -> Self:
        """Connect, and list the tools."""
        with extra("mcp", "MCPTools"):
            mcp: Any = import_module("mcp")
        server: Any = None
        if self._command:
            program, *arguments = self._command
            server = mcp.StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        self._refused = mcp.MCPError
        try:
            async with AsyncExitStack() as stack:
                if server is None:
                    server = _by_http(self._url, await stack.enter_async_context(_http_client()))
                self._session = await stack.enter_async_context(mcp.Client(server))
                self.definitions = await await_user(self._listed)
                self._stack = stack.pop_all()
        except Exception as error:
            address, cause = self._url or " ".join(self._command), single_exception(error)
            raise ConnectionError(
                f"MCPTools: expected a server of MCP at {address}, got {type(cause).__name__}: {cause}"
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Disconnect."""
        await self._stack.__aexit__(kind, error, traceback)

    async def _listed(self) -> list[dict[str, Any]]:
        found: list[Any] = []
        cursor: str | None = None
        while True:
            page = await self._session.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                return [_definition(tool) for tool in found]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result. What the server refuses, such as an unknown name, is its reason."""
        try:
            result = await self._session.call_tool(name, dict(arguments))
        except self._refused as error:
            return f"error: {error}"
        return "\n".join(text for part in result.content if (text := getattr(part, "text", None)) is not None)

    async def results(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages with the results of the tools that a message of the assistant calls, in order."""
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": await self.call(call["function"]["name"], json.loads(call["function"]["arguments"])),
            }
            for call in message.get("tool_calls") or ()
        ]


def _http_client() -> Any:
    """Return a client that reuses connections of the last second: servers close those that are idle for some more.

    A call that meets a closing one would end the session, with all that share it.
    """
    http: Any = import_module("httpx2")
    limits = http.Limits(max_connections=None, max_keepalive_connections=MOST_IDLE, keepalive_expiry=1.0)
    return http.AsyncClient(limits=limits, timeout=http.Timeout(30.0, read=300.0))


def _by_http(url: str, client: Any) -> Any:
    streamable: Any = import_module("mcp.client.streamable_http")
    return streamable.streamable_http_client(url, http_client=client)


def _definition(tool: Any) -> dict[str, Any]:
    """Return a tool of the protocol as one of OpenAI's."""
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}
