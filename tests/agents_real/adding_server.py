"""A server of MCP with one tool, over stdio; with a port as argument, over HTTP."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

MCPServer: Any = import_module("mcp.server").MCPServer
server: Any = MCPServer("adding")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


server.add_tool(add)

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
