"""A shop as a server of the Model Context Protocol, by HTTP. It sells 260 kinds of things, three offers of each.

    python shop_server.py penstock run shop.yaml      serves the shop for as long as the command runs
    python shop_server.py                             serves it until Ctrl-C

It remembers nothing between two calls, so that one session does for all rollouts of a worker.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from random import Random
from typing import Any

PORT = int(os.environ.get("SHOP_PORT", "8765"))

LETTERS = "abcdefghijklmnopqrstuvwxyz"

KINDS = [letter + digit for letter in LETTERS for digit in "0123456789"]


def prices(kind: str) -> dict[str, int]:
    """Return the price of each offer of a kind; the name of an offer is a letter."""
    random = Random(kind)  # noqa: S311 (no secret)
    return dict(zip(random.sample(LETTERS, 3), random.sample(range(1, 10), 3), strict=True))


def search(kind: str) -> str:
    """List the offers of a kind, each with its price, such as `q7f4z9`."""
    return "".join(f"{offer}{price}" for offer, price in prices(kind).items())


def look(kind: str, offer: str) -> str:
    """Return the price of an offer."""
    return str(prices(kind).get(offer, "no"))


def buy(kind: str, offer: str, most: int) -> str:
    """Buy an offer if it costs at most `most`, and return the receipt: what was bought, and its price."""
    price = prices(kind).get(offer)
    return "no" if price is None or price > most else f"{kind}{price}"


TOOLS = (search, look, buy)


def main() -> None:
    """Serve the shop while a command runs, or until Ctrl-C."""
    uvicorn: Any = import_module("uvicorn")
    shop: Any = import_module("mcp.server").MCPServer("shop")
    for tool in TOOLS:
        shop.add_tool(tool)
    app = shop.streamable_http_app(stateless_http=True, json_response=True)
    server = uvicorn.Server(uvicorn.Config(app, port=PORT, log_level="warning"))
    serving = threading.Thread(target=server.run, daemon=True)
    serving.start()
    while serving.is_alive() and not server.started:
        time.sleep(0.05)
    if not server.started:
        sys.exit(1)  # uvicorn has written why
    if command := sys.argv[1:]:
        sys.exit(subprocess.run(command, check=False).returncode)  # noqa: S603 (the user's)
    serving.join()


if __name__ == "__main__":
    main()
