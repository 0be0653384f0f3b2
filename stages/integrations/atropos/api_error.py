"""AtroposAPIError: a failed request to a server of the contract, with things to check. Knows no HTTP client."""

from __future__ import annotations

from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from ...._pipeline.errors import PenstockError

Situation: TypeAlias = Literal[
    "refused", "timed out", "unreachable", "certificate", "rejected", "failed", "no JSON", "another trainer", "empty"
]
"""`rejected` is a status of 4xx, `failed` one of 5xx, or a connection that broke."""

CHECKS: dict[Situation, tuple[str, ...]] = {
    "refused": (
        "is the server running? It is started with `penstock gateway --port {port}`, or as `run-api --port {port}`",
        "is {url} its address, and not the loopback of another host or container?",
    ),
    "timed out": (
        "does the server answer at all? Try `curl {url}/info`; the original does not answer while it reads groups",
        "does a firewall drop connections to {host}?",
        "is it only slow? Raise `request_timeout_s` (from_yaml and from_config: ATROPOS_TIMEOUT)",
    ),
    "unreachable": ("does {host} resolve? Try `getent hosts {host}`", "is the network up?"),
    "certificate": (
        "is the server's certificate signed by a CA of your own? Give the CA's file: `ca`",
        "is the certificate made for {host}, and still valid?",
        "does the server speak https at all? A penstock gateway does when it is given a certificate and a key",
    ),
    "rejected": (
        "does the answer name a fault of the request? Correct it in the sender",
        "is this a server of Atropos or a penstock gateway? Try `curl {url}/`",
        "does it require a token? Pass it: `token`, PENSTOCK_TOKEN, or in the URL: anyone:<token>@{host}:{port}",
    ),
    "failed": (
        "what does the log of the server say?",
        "does it still run? Try `curl {url}/status`",
        "is a score NaN? The original then fails like this, and loses the batch",
    ),
    "no JSON": (
        "is this a server of Atropos or a penstock gateway, and not another page? Try `curl {url}/`",
        "does a proxy answer in its place?",
    ),
    "another trainer": (
        "is there another trainer, or was there one? The first registration counts until `curl {url}/reset_data`",
        "did environments send groups before any trainer registered? Restart the original server then",
    ),
    "empty": (
        "do environments run, and with this server? `curl {url}/status` shows how many groups wait",
        "do their groups add up to batch_size? The original keeps sizes that do not divide it for ever",
        "are the environments only slow? Raise `batch_timeout_s`",
    ),
}
"""Things to check, the likeliest first."""


def without_token(url: str) -> str:
    """Return `url` without user and password, for messages and logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class AtroposAPIError(PenstockError):
    """A server of the Atropos contract does not answer as it should; the message lists things to check.

    `situation` is the kind of failure, for programs.
    """

    def __init__(self, situation: Situation, url: str, request: str, found: str) -> None:
        parts = urlsplit(url)
        method, _, path = request.partition(" ")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        fields = {"url": without_token(url), "host": parts.hostname, "port": port}
        checks = "; ".join(
            f"({number}) {check.format_map(fields)}" for number, check in enumerate(CHECKS[situation], 1)
        )
        self.situation: Situation = situation
        self.summary: str = f"{method} {without_token(url)}{path}: {found}"
        """The message without the things to check."""
        super().__init__(f"{self.summary}. To check: {checks}")
