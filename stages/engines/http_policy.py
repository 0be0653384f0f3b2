"""The description of a policy that samples at an inference server: vLLM, SGLang, or another that returns token ids.

Describing it needs no HTTP client; `open` imports the engine, which does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ..._pipeline.context import Worker
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.extras import extra
from ..._schemas.config import check_url
from ..._schemas.numbers import normalize_counts, normalize_numbers
from .backoff import Backoff
from .inference_servers import SERVERS, KnownServer, Server
from .policies import Engine

__all__ = ["HttpPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPolicy:
    """A recipe for sampling at an inference server."""

    url: str
    """Of the server, without a path: `http://127.0.0.1:8000`."""
    model: str
    """What the server calls the model."""
    server: Server = "auto"
    """Which server it is; `auto` asks it. vLLM and SGLang can be told to pause, to sleep, and to take new weights."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    concurrency: int = 64
    """Requests at once; those beyond wait here, where they cost nothing."""
    request_timeout_s: float = 600.0
    """How long one attempt may take, from the request to the last token."""
    backoff: Backoff = field(default_factory=Backoff)
    """How often what fails in passing is tried, and how long is waited in between."""
    tempered_logprobs: bool | None = None
    """Whether the server's log-probabilities are those of the tempered distribution; by default what it does unless
    told otherwise: SGLang yes, vLLM no (started with `--logprobs-mode processed_logprobs`: yes), others no."""
    versions: Literal["told", "asked"] = "told"
    """How the engine knows the version of the server's weights: from its own `update_weights`, or by asking the server
    before every completion, where somebody else may have updated them."""
    tokenizer: Any = field(default=None, repr=False)
    """What the server's model reads, or its `TokenizerIdentity`: `pipeline.check()` holds it to those of the others."""

    def __post_init__(self) -> None:
        """Refuse what can never sample anything.

        Raises:
            InvalidConfig: naming the field.
        """
        check_url(self.url, "HttpPolicy.url")
        if self.server != "auto" and self.server not in SERVERS:
            raise InvalidConfig(f"HttpPolicy.server: expected one of auto, {', '.join(SERVERS)}, got {self.server!r}")
        normalize_counts(self, "concurrency")
        normalize_numbers(self, "request_timeout_s")
        if self.server != "auto":
            self.check_versions(self.server)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:
        """Connect, make sure that the server knows the model, and ask which server it is where that is `auto`.

        Raises:
            NobodyListens: nothing answers at `url`.
            EngineRefused: the server has another model.
            InvalidConfig: `versions` is "asked", and this server cannot be asked.
            MissingExtra: aiohttp is not installed.
        """
        with extra("http", "HttpPolicy"):
            from .http_engine import open_engine  # noqa: PLC0415 (describing a policy does not need aiohttp)
        async with open_engine(self, worker) as engine:
            yield engine

    def check_versions(self, server: KnownServer) -> None:
        """Hold `versions` to what a server of that kind can do.

        Raises:
            InvalidConfig: `versions` is "asked", and such a server cannot be asked.
        """
        if self.versions == "asked" and SERVERS[server].version is None:
            raise InvalidConfig(f'HttpPolicy.versions: expected "told", got "asked": {server} cannot be asked')
