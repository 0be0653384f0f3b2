"""Serve a gateway: its configuration, its backend, and `penstock gateway`, where environments and trainers talk HTTP.

Imports no HTTP server, so that `penstock --help` and a pipeline's description need none; `open_server` does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
import anyio.to_thread

from ....._pipeline.errors import InvalidConfig
from ....._pipeline.util.extras import extra
from ....._pipeline.util.signals import handled_stop_signals
from ....._pipeline.util.waiting import Waiters
from ....._schemas import TrajectoryGroup
from ....._schemas.numbers import normalize_counts
from ..contract import ScoredData, Untrainable
from ..queue.records import Batch, Submission
from ..queue.trajectory_queue import TrajectoryQueue
from ..translation import from_group
from .limits import Limits
from .shm_receiver import CAPACITY_BYTES

if TYPE_CHECKING:
    from .running import RunningGateway

G = TypeVar("G")

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, access and limits of a gateway.

    >>> ServerConfig(token="from the environment").port
    8000

    Raises:
        InvalidConfig: the token cannot be sent in a header, a key has no certificate, or a size is not positive.
    """

    host: str = "127.0.0.1"
    """Address to listen at; beyond loopback only with a token."""
    port: int = DEFAULT_PORT
    """0 for a free one."""
    token: str | None = field(default=None, repr=False)
    """Secret that clients send, as a bearer token or as the password in their URL."""
    certfile: str | None = None
    """Path of the certificate chain in PEM; with it the gateway speaks https."""
    keyfile: str | None = None
    """Path of the certificate's key in PEM; None where `certfile` holds it too."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on requests and connections."""
    shm_bytes: int = CAPACITY_BYTES
    """Shared memory for each environment on this host that sends through it. A larger group goes over HTTP."""

    def __post_init__(self) -> None:
        normalize_counts(self, "shm_bytes")
        normalize_counts(self, "port", least=0)
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise InvalidConfig(
                "ServerConfig.token: expected printable ASCII that neither begins nor ends with a space, as in "
                f"headers, got {'an empty one' if not token else 'another'}; without a token it is None"
            )
        if self.keyfile is not None and self.certfile is None:
            raise InvalidConfig(
                "ServerConfig.keyfile: expected a certfile beside it, got none: name the certificate that the key "
                "belongs to (certfile=, --certfile)"
            )


class Listening:
    """The URL of a stage, while it has one. One event loop uses it."""

    def __init__(self) -> None:
        self._url: str | None = None
        self._waiting = Waiters()

    def __repr__(self) -> str:
        return f"<Listening at {self._url}>" if self._url else "<Listening nowhere>"

    async def url(self) -> str:
        """Return the URL as soon as there is one."""
        while self._url is None:
            await self._waiting.wait()
        return self._url

    @contextmanager
    def at(self, url: str) -> Iterator[None]:
        """Set the URL within the body."""
        self._url = url
        self._waiting.wake_all()
        try:
            yield
        finally:
            self._url = None


class Backend(Generic[G]):
    """Turns scored data into the groups of a queue and back, and is notified when groups arrive and leave.

    There are three: `RelayBackend` keeps JSON for trainers; a source keeps groups for a pipeline, a sink those of a
    pipeline for trainers. Methods that convert may block, and run in a thread.
    """

    unavailable: Mapping[str, str] = {}
    """Endpoints that this gateway does not have, by path, with the reason."""
    takes_groups: bool = True
    """True if environments send to this gateway, which they may do through shared memory."""

    @property
    def complete(self) -> bool:
        """True once the last step is done: groups are dropped from then on, and no batch is sent."""
        return False

    @property
    def step(self) -> int | None:
        """The trainer's step; None where the queue counts it."""
        return None

    @property
    def downstream(self) -> int:
        """Groups that a pipeline took and that wait in its channel."""
        return 0

    def of_scored(self, scored: ScoredData, env: str) -> G:
        """Return a group of the environment `env`.

        Raises:
            Untrainable: it is valid, and cannot be trained on.
        """
        raise NotImplementedError

    def of_group(self, group: TrajectoryGroup, env: str) -> G:
        """Return a group that arrived decoded, as `of_scored` does."""
        raise NotImplementedError

    def nbytes(self, payload: G) -> int:
        """Return its size."""
        raise NotImplementedError

    def json(self, payload: G) -> bytes:
        """Return its JSON in the form of /batch."""
        raise NotImplementedError

    def arrived(self, submissions: Sequence[Submission[G]]) -> None:
        """Note accepted groups."""

    def registered(self) -> None:
        """Note that a trainer registered: batch size and number of steps may have changed."""

    def asked(self, batch: Batch[G] | None) -> None:
        """Note a trainer's request, which is answered with `batch`; None if there is no batch."""

    def delivered(self, batch: Batch[G], *, acknowledged: bool) -> None:
        """Note that a trainer has `batch`: it acknowledged it, or asked for no lease and it was written."""


@asynccontextmanager
async def open_server(
    config: ServerConfig, queue: TrajectoryQueue[G], backend: Backend[G], name: str
) -> AsyncGenerator[RunningGateway[G]]:
    """Serve `queue` within the body; `name` is for errors.

    Raises:
        MissingExtra: the packages for an HTTP server are not installed.
        InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
        OSError: the host is unknown, or the port is taken.
    """
    await anyio.to_thread.run_sync(_import_server, name)
    from .running import run_server  # noqa: PLC0415 (needs packages of an extra)

    async with run_server(config, queue, backend) as running:
        yield running


def _import_server(name: str) -> None:
    """Import the server, or raise MissingExtra. Blocks."""
    with extra("gateway", name):
        import_module(f"{__package__}.running")


# -- penstock gateway --------------------------------------------------------------------------------------------------


class RelayBackend(Backend[bytes]):
    """The backend of a server whose environments and trainers both talk HTTP: groups stay JSON."""

    def of_scored(self, scored: ScoredData, env: str) -> bytes:  # noqa: ARG002 (see `Backend`)
        """Return the group as JSON. Only the lists that trainers stack are checked: they must be of one length."""
        lengths = [*map(len, scored.tokens)]
        if [*map(len, scored.masks)] != lengths or len(scored.scores) != len(lengths):
            raise Untrainable("lengths", "masks, scores: expected one for each of tokens, got more or fewer")
        return scored.json()

    def of_group(self, group: TrajectoryGroup, env: str) -> bytes:  # noqa: ARG002 (see `Backend`)
        """Return JSON of the contract."""
        return from_group(group)

    def nbytes(self, payload: bytes) -> int:
        """Return its length."""
        return len(payload)

    def json(self, payload: bytes) -> bytes:
        """Return the payload, which is JSON."""
        return payload


async def serve(config: ServerConfig, queue: TrajectoryQueue[bytes], on_listening: Callable[[str], None]) -> None:
    """Serve until a stop signal arrives; `on_listening` is called with the URL.

    Raises:
        MissingExtra: the packages for an HTTP server are not installed.
        InvalidConfig: the host is beyond loopback and there is no token, or the certificate cannot be used.
        OSError: the host is unknown, or the port is taken.
    """
    with anyio.open_signal_receiver(*handled_stop_signals()) as signals:
        async with open_server(config, queue, RelayBackend(), "penstock gateway") as running:
            on_listening(running.url)
            async for _ in signals:
                return
