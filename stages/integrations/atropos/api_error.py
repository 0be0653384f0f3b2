"""AtroposAPIError: what was asked of a server, what came back, and what to look at. Knows no HTTP client."""

from __future__ import annotations

from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from ....pipeline.errors import PenstockError

__all__ = ["AtroposAPIError", "Situation", "shown"]

Situation: TypeAlias = Literal[
    "refused", "timed out", "unreachable", "rejected", "failed", "no JSON", "another trainer", "empty"
]
"""`rejected` is a status of 4xx, `failed` one of 5xx, or a connection that broke."""

WHERE = "It is `api_url`; from_yaml and from_config heed ATROPOS_API_URL before that"

STEPS: dict[Situation, tuple[str, ...]] = {
    "refused": (
        "is the server running? It is started with `penstock gateway --port {port}`, or as `run-api --port {port}`",
        "is {url} its address? {where}",
        "does it listen where this process can reach it, and not on the loopback of another host or container?",
    ),
    "timed out": (
        "does the server answer at all? `curl {url}/info` tells; the original is silent while it reads groups",
        "is {url} its address? {where}",
        "does a firewall between here and there swallow connections?",
        "is it only slow? Give it longer: `timeout_s` (from_yaml and from_config: ATROPOS_TIMEOUT)",
    ),
    "unreachable": (
        "is {host} spelled as the network knows it? `getent hosts {host}` tells",
        "is {url} the server's address? {where}",
        "is the network up, and is there a way to it (VPN, container network, proxy)?",
    ),
    "rejected": (
        "is this a server of Atropos or a penstock gateway? `curl {url}/` says so",
        "does it want a token? Give it: `token`, or as http://anyone:<token>@{host}:{port}",
        "does anything stand in between that answers by itself (a proxy, a load balancer)?",
    ),
    "failed": (
        "what does the log of the server say?",
        "does it still run? `curl {url}/status` tells",
        "is a score NaN? The original fails so then, and loses the batch; a penstock gateway refuses the group",
        "does a proxy in between answer for a server that is gone?",
    ),
    "no JSON": (
        "is this a server of Atropos or a penstock gateway, and not another page? `curl {url}/` says so",
        "is {url} its address, without a path? {where}",
        "does anything stand in between that answers by itself (a proxy, a login page)?",
    ),
    "another trainer": (
        "does another trainer use the server? Stop it, or give this one a server of its own",
        "did one before? The first registration counts until `curl {url}/reset_data`",
        "did environments send groups before any trainer registered? The original server is spoilt then: restart it",
    ),
    "empty": (
        "do environments run, and with this server? `curl {url}/status` tells how many groups wait",
        "do their groups add up to batch_size? Sizes that do not divide it wait for ever",
        "has an environment with a minimum allocation died? The original waits for its groups for ever",
        "are the environments only slow? Wait longer: `empty_s`",
    ),
}
"""What to look at, the likeliest first."""


def shown(url: str) -> str:
    """`url` as it may be shown: without a token."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class AtroposAPIError(PenstockError):
    """A server of the Atropos contract does not answer as it should; the message says what to look at.

    `situation` says in a word what is wrong, for whoever would rather do something about it than read.
    """

    def __init__(self, situation: Situation, url: str, request: str, came: str) -> None:
        parts = urlsplit(url)
        method, _, path = request.partition(" ")
        words = {"url": shown(url), "host": parts.hostname, "port": parts.port or 80, "where": WHERE}
        steps = "; ".join(f"({number}) {step.format_map(words)}" for number, step in enumerate(STEPS[situation], 1))
        self.situation: Situation = situation
        self.told = f"{method} {shown(url)}{path}: {came}"
        """The message without what to look at."""
        super().__init__(f"{self.told}. To look at: {steps}")
