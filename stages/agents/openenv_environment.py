"""`OpenEnvEnvironment`: an environment that a server of OpenEnv runs, as a step-wise one. Extra `openenv`.

It speaks the messages of the server itself, JSON over a websocket. So the packages of the environment stay there, and
no step reaches a session without the episode, as when openenv's client connects again by itself. Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..._pipeline.errors import InvalidConfig, PenstockError
from ..._pipeline.util.extras import extra
from ..._schemas.numbers import normalize_counts, normalize_numbers

ENDLESS = 1000
"""Steps after which an episode is taken for one that never ends, if no bound is set."""

CLOSE_TIMEOUT_S = 1.0

REMEDIES = {
    "CAPACITY_REACHED": "; each concurrent rollout has a session: start the server with a larger max_concurrent_envs",
    "VALIDATION_ERROR": "; see OpenEnvEnvironment.action",
}


class SessionFailed(PenstockError):
    """A server of OpenEnv cannot be reached, refuses a message, does not answer, or has ended."""


@dataclass(frozen=True)
class OpenEnvEnvironment:
    """An environment at a server of OpenEnv, a session for each concurrent rollout; the `make_env` of a source.

    The seed of an episode is that of its prompt. Its reward is the sum of those of its steps.

        OpenEnvEnvironment("http://127.0.0.1:8000", action="message", observation="echoed_message")

    Raises:
        InvalidConfig: a field cannot be used.
        MissingExtra: when it is called: the package `websockets` is not installed.
        SessionFailed: when it is called, and in episodes; the message names the URL.
    """

    url: str
    """Of the server, http:// or https://."""
    action: str | Callable[[str], Mapping[str, Any]]
    """The field of an action that has the text of a completion; or a function that returns the action for a text."""
    observation: str | Callable[[Mapping[str, Any]], Any]
    """The field of an observation that has its text; or a function that returns text or messages for an observation."""
    max_steps: int | None = None
    """Steps after which an episode is truncated; None fails one that has not ended after 1,000."""
    timeout_s: float = 60.0
    """Bound on the time of a step, of a reset and of connecting."""

    def __post_init__(self) -> None:
        """Check the fields."""
        normalize_counts(self, "max_steps")
        normalize_numbers(self, "timeout_s")
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise InvalidConfig(f"OpenEnvEnvironment.url: expected http://… or https://…, got {self.url!r}")
        for name in ("action", "observation"):
            value = getattr(self, name)
            if not (callable(value) or (isinstance(value, str) and value)):
                raise InvalidConfig(
                    f"OpenEnvEnvironment.{name}: expected the name of a field or a function, got {value!r}"
                )

    def __call__(self) -> OpenEnvSession:
        """Connect. Blocks."""
        return OpenEnvSession(self)


class OpenEnvSession:
    """A session at the server: a step-wise environment."""

    def __init__(self, of: OpenEnvEnvironment) -> None:
        with extra("openenv", "OpenEnvEnvironment"):
            self._client: Any = import_module("websockets.sync.client")
        self._errors: Any = import_module("websockets.exceptions")
        self._of = of
        self._steps = 0
        """Those of the episode."""
        self._connected = ExitStack()
        self._connection = self._connect()

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, at a new connection if the server has ended the last one."""
        if self._connection.state.name != "OPEN":
            self._connection = self._connect()
        self._steps = 0
        return self._text(self._ask("reset", {} if seed is None else {"seed": seed})), {}

    def step(self, action: str, /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do an action."""
        named = self._of.action
        answer = self._ask("step", {named: action} if isinstance(named, str) else named(action))
        self._steps += 1
        ended, truncated = bool(answer.get("done")), self._steps == self._of.max_steps
        if self._of.max_steps is None and self._steps >= ENDLESS and not ended:
            raise SessionFailed(f"{self._of.url}: the episode has not ended after {ENDLESS} steps: set max_steps")
        text = "" if ended or truncated else self._text(answer)
        return text, float(answer.get("reward") or 0.0), ended, truncated and not ended, {}

    def close(self) -> None:
        """End the session."""
        self._connected.close()

    def _connect(self) -> Any:
        of, parts = self._of, urlsplit(self._of.url)
        self._connected.close()
        try:
            connecting = self._client.connect(
                f"{parts.scheme.replace('http', 'ws')}://{parts.netloc}{parts.path.rstrip('/')}/ws",
                open_timeout=of.timeout_s,
                close_timeout=CLOSE_TIMEOUT_S,
                max_size=None,
                proxy=None,
            )
            return self._connected.enter_context(connecting)
        except (OSError, self._errors.WebSocketException) as error:
            raise SessionFailed(f"{of.url}: expected a server of OpenEnv: {error}") from error

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a message: observation, reward, done."""
        url, timeout_s = self._of.url, self._of.timeout_s
        text = msgspec.json.encode({"type": kind, "data": data}).decode()
        try:
            with suppress(self._errors.ConnectionClosed):  # a session that is refused has ended: the reason can be read
                self._connection.send(text)
            answer: dict[str, Any] = msgspec.json.decode(self._connection.recv(timeout_s))
        except TimeoutError:
            raise SessionFailed(f"{url}: expected an answer to {kind} within {timeout_s:g} s") from None
        except self._errors.ConnectionClosed as error:
            raise SessionFailed(f"{url}: the server ended the session before it answered {kind}: {error}") from error
        data = answer["data"]
        if answer["type"] == "error":
            raise SessionFailed(f"{url} refuses {kind}: {_reason(data)}")
        return dict(data)

    def _text(self, answer: Mapping[str, Any]) -> Any:
        observation, named = answer["observation"], self._of.observation
        if not isinstance(named, str):
            return named(observation)
        if named not in observation:
            fields = ", ".join(observation)
            raise SessionFailed(f"{self._of.url}: expected an observation with {named}, got one with {fields}")
        return observation[named]


def _reason(data: Mapping[str, Any]) -> str:
    """Return the reason of a refusal, with the fields that are wrong, and a remedy."""
    wrong = "".join(f"; {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in data.get("errors", ()))
    return f"{data.get('message')}{wrong}{REMEDIES.get(data.get('code', ''), '')}"
