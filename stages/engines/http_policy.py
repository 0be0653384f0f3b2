"""The description of a policy that samples at an inference server: vLLM, SGLang, or another that returns token ids.

Describing it needs no HTTP client; `open` imports the engine and the client.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from ..._pipeline.errors import InvalidConfig
from ..._pipeline.graph.context import Worker
from ..._pipeline.util.extras import extra
from ..._schemas.choices import check_choice
from ..._schemas.config import check_url
from ..._schemas.numbers import normalize_counts, normalize_numbers
from ..contracts.policies import Engine
from ..contracts.routed_experts import RoutedExperts
from ..http.retry import Backoff, jitter
from .inference_servers import SERVERS, KnownServer, Server


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPolicy:
    """A picklable description of sampling at an inference server, or at several with the same model."""

    url: str | Sequence[str]
    """URL of the server, without a path: `http://127.0.0.1:8000`. Of several, each worker samples at one, in turn."""
    model: str
    """Name of the model at the server."""
    server: Server = "auto"
    """Kind of server; `auto` detects it. vLLM and SGLang can pause, sleep, and load new weights."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    concurrency: int = 64
    """Requests at once; others wait in this process, at no cost to the server."""
    request_timeout_s: float = 600.0
    """Bound on the time of one attempt, from the request to the last token."""
    backoff: Backoff = field(default_factory=Backoff)
    """Number of attempts after temporary failures, and the pauses between them."""
    tempered_logprobs: bool | None = None
    """True if the server's log-probabilities are those of the tempered distribution; by default as the
    server does by default: SGLang yes, vLLM no (started with `--logprobs-mode processed_logprobs`: yes), others no."""
    versions: Literal["engine", "server"] = "engine"
    """Source of the version of the server's weights: `engine`, its own `update_weights`; or `server`, a request before
    every completion, for a server that others may update."""
    routed_experts: RoutedExperts | None = None
    """Shape of the record of the experts that a mixture chooses, as column `routed_experts`, for a trainer with
    `router_replay="R3"`. vLLM and SGLang return it if they are started with `--enable-return-routed-experts`. Answers
    are not streamed then. None for no record."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidConfig: naming the field.
        """
        if not self.urls:
            raise InvalidConfig("HttpPolicy.url: expected a URL, got none")
        for url in self.urls:
            check_url(url, "HttpPolicy.url")
        check_choice("HttpPolicy.server", self.server, ("auto", *SERVERS))
        check_choice("HttpPolicy.versions", self.versions, ("engine", "server"))
        normalize_counts(self, "concurrency")
        normalize_numbers(self, "request_timeout_s")
        if self.server != "auto":
            self.check_server(self.server)

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the URL of each server."""
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)

    @asynccontextmanager
    async def open(self, worker: Worker) -> AsyncGenerator[Engine]:
        """Connect, check that the server has the model, and detect the kind of server if it is `auto`.

        Raises:
            NobodyListens: no server responds at `url`.
            EngineRefused: the server has another model.
            InvalidConfig: this server does not report versions, or experts; see `check_server`.
            MissingExtra: aiohttp is not installed.
        """
        with extra("http", "HttpPolicy"):  # describing a policy does not need aiohttp
            from ..http.server_client import open_client  # noqa: PLC0415
            from .http_engine import HttpEngine, check_model, detected  # noqa: PLC0415
        url = self.urls[worker.index % len(self.urls)]
        async with open_client(
            url, self.api_key, self.backoff, request_timeout_s=self.request_timeout_s, draw=jitter(worker)
        ) as client:
            await check_model(client, self.model)
            server = await detected(client) if self.server == "auto" else self.server
            self.check_server(server)
            yield HttpEngine(
                client,
                server,
                model=self.model,
                concurrency=self.concurrency,
                tempered_logprobs=self.tempered_logprobs,
                versions=self.versions,
                routed_experts=self.routed_experts,
            )

    def check_server(self, server: KnownServer) -> None:
        """Check that a server of this kind supports `versions` and `routed_experts`.

        Raises:
            InvalidConfig: such a server does not report versions, or experts.
        """
        if self.routed_experts is not None and SERVERS[server].routing is None:
            raise InvalidConfig(
                f"HttpPolicy.routed_experts: expected none at a server of kind {server}, which returns no experts, got "
                f"{self.routed_experts}: use vLLM or SGLang"
            )
        if self.versions == "server" and SERVERS[server].version is None:
            raise InvalidConfig(f'HttpPolicy.versions: expected "engine", got "server": {server} reports no versions')
