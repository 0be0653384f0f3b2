"""`AgentEndpoint`: an HTTP server in the running event loop, which agents call as a provider of models."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
import msgspec

from ...._pipeline.errors import InvalidConfig
from ...http.limits import Limits, RequestRejections
from ...http.serving import BACKLOG, serving
from ...tokenizers.chat_format import ChatFormat
from .application import Application, ServedRollouts
from .chat_completions import CHAT_COMPLETIONS
from .refusals import RequestRefused, decoded, openai_error_body
from .routes import ROUTES
from .served_rollout import SamplesCalls, ServedRollout, SharedState

REQUEST_BYTES = 32 * 2**20

CONNECTIONS = 16_384
"""Open connections, within half of the files that this process may open: agents of one host share an address."""


class AgentEndpoint:
    """Serves rollouts on loopback, or at a Unix socket, within the `async with`.

    Raises, on entering:
        OSError: the socket cannot be bound.
    """

    def __init__(
        self,
        chat: ChatFormat,
        *,
        unix_socket: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Configure an endpoint.

        Args:
            chat: writes the messages of agents as tokens; its `tools` are those of requests without any.
            unix_socket: path to listen at in place of a port on loopback.
            limits: bounds on requests and connections.
        """
        self._chat = chat
        self._unix_socket = unix_socket
        self._limits = limits or _limits()
        self._rollouts = ServedRollouts()
        self._stack = AsyncExitStack()
        self.url: str = ""
        """Address of the server, without the path of an API; set while it runs."""

    async def __aenter__(self) -> Self:
        """Listen."""
        async with AsyncExitStack() as stack:
            listener = await anyio.to_thread.run_sync(self._listen)
            stack.push_async_callback(self._close, listener)
            app = Application(ROUTES, self._rollouts, self._limits)
            server = serving(app, listener, self._limits, RequestRejections(), openai_error_body)
            await stack.enter_async_context(server)
            self._stack = stack.pop_all()
        self.url = "http://localhost" if self._unix_socket else f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish the answers in progress, and close the socket."""
        await self._stack.__aexit__(kind, error, traceback)

    @contextmanager
    def serve(self, client: SamplesCalls, shared: SharedState | None = None) -> Iterator[ServedRollout]:
        """Answer calls of `client`, with a key of its own, within the body; later ones are refused as ended.

        `shared` is the state of its rollout, for a rollout of several clients.
        """
        served = ServedRollout(client, self._chat, url=self.url, shared=shared)
        self._rollouts.add(served)
        try:
            yield served
        finally:
            self._rollouts.remove(served)

    @staticmethod
    async def chat(served: ServedRollout, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message that answers a request of OpenAI's chat, without HTTP.

        Raises:
            InvalidConfig: a field is unknown, or cannot be obeyed.
            InvalidData: the template refuses the messages.
            CallRefused: the call is not sampled.
        """
        try:
            given = decoded(CHAT_COMPLETIONS.decoder, msgspec.json.encode(request))
            sample = CHAT_COMPLETIONS.ask(served, given)
            async with served.shared.calls:
                answer = await sample()
        except RequestRefused as error:
            raise InvalidConfig(f"chat: {error}") from None
        message: dict[str, Any] = CHAT_COMPLETIONS.body(served, given, answer)["choices"][0]["message"]
        return message

    def _listen(self) -> socket.socket:
        """Return a socket that listens. Blocks."""
        listener = (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            if self._unix_socket
            else socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        )
        try:
            listener.bind(str(self._unix_socket) if self._unix_socket else ("127.0.0.1", 0))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    async def _close(self, listener: socket.socket) -> None:
        listener.close()
        if self._unix_socket:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._unix_socket.unlink)


def _limits() -> Limits:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = CONNECTIONS if files == resource.RLIM_INFINITY else min(CONNECTIONS, files // 2)
    return Limits(request_bytes=REQUEST_BYTES, connections=connections, connections_per_address=connections)
