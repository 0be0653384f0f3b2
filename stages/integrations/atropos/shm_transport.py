"""ShmTransport: an environment of Atropos on the gateway's host sends its groups through shared memory.

It overrides the one method behind all of the environment's own filters; registration and flow control stay HTTP, so
the gateway knows the environment, and reports the true depth to it. Uses only the names `config`, `env_id` and
`curr_step` of Atropos.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import anyio

from .api_error import load_http_api
from .submitter import Submitter, submitting

__all__ = ["ShmTransport"]

METHOD = "_send_scored_data_to_api"

Scored: TypeAlias = Mapping[str, Any]
Send: TypeAlias = Callable[[Any], Awaitable[Any]]

E = TypeVar("E")


class ShmTransport:
    """Mixed in before an environment's class, or attached to an environment, it sends through shared memory.

        class MyEnv(ShmTransport, TheirEnv): ...
        env = ShmTransport.attach(TheirEnv(config, servers))

    To a gateway on another host groups go over HTTP, after one warning; to a server that is no gateway the
    environment itself sends them.
    """

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        parent: Any = super()
        await _connection_of(self).send(scored_data, getattr(parent, METHOD))

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse an order of bases in which the environment's own method would be called, and not this one.

        Raises:
            TypeError: naming the class that must come second.
        """
        super().__init_subclass__(**options)
        order = cls.__mro__[1:]
        before = [base for base in order[: order.index(ShmTransport)] if METHOD in vars(base)]
        if before and not any(METHOD in vars(base) for base in order[order.index(ShmTransport) + 1 :]):
            name = before[0].__name__
            raise TypeError(f"expected class {cls.__name__}(ShmTransport, {name}), got {name} before ShmTransport")

    @staticmethod
    def attach(env: E, *, token: str | None = None, ca: str | None = None) -> E:
        """Make `env`, and no other environment of its class, send through shared memory; return it.

        `token` and `ca` are for HTTP, as in `submit`. The environment's own requests know neither: they take a token
        from the password of `rollout_server_url`, and a CA from the variable SSL_CERT_FILE.

        Raises:
            TypeError: it is no environment of Atropos.
        """
        by_http = getattr(env, METHOD, None)
        if by_http is None:
            raise TypeError(f"expected an environment of Atropos, with {METHOD}, got a {type(env).__name__}")
        connection = _connection_of(env, token, ca)
        if isinstance(env, ShmTransport):
            return env

        async def send(scored_data: Any) -> None:
            await connection.send(scored_data, by_http)

        setattr(env, METHOD, send)
        return env


def _connection_of(env: Any, token: str | None = None, ca: str | None = None) -> _ShmConnection:
    """Return the connection of `env`, which opens with its first group: after the environment has registered."""
    connection = vars(env).get("_penstock_connection")
    if connection is None:
        connection = env._penstock_connection = _ShmConnection(env, token, ca)  # noqa: SLF001 (a name Atropos has no use for)
    return cast("_ShmConnection", connection)


def _listed(scored_data: Scored | Sequence[Scored]) -> Sequence[Scored]:
    return [scored_data] if isinstance(scored_data, Mapping) else scored_data


class _ShmConnection:
    """An environment's connection to its gateway.

    A separate task keeps it open, so that a cancelled worker, or a `cleanup()`, does not close it; it
    ends with the event loop.
    """

    def __init__(self, env: Any, token: str | None, ca: str | None) -> None:
        load_http_api("ShmTransport")
        self._env = env
        self._access = {"token": token, "ca": ca}
        self._opened: asyncio.Future[Submitter] | None = None
        self._task: asyncio.Task[None] | None = None

    async def send(self, scored_data: Scored | Sequence[Scored], by_http: Send) -> None:
        """Send one group, or several, waiting for credit if need be. Cancelled, it has not sent the current group.

        Raises:
            AtroposAPIError: the gateway refused it, or was unreachable for too long.
            NobodyListens: the gateway on this host disconnected, and did not return in time.
        """
        env_id, config = getattr(self._env, "env_id", None), self._env.config
        name = str(
            getattr(config, "wandb_name", None) or type(self._env).__name__
        )  # replaced by the name that the gateway registered
        origin = {"env": name, "policy_version": getattr(self._env, "curr_step", 0)}
        groups: Any = [{**one, "env_id": env_id} for one in _listed(scored_data)]
        submitter = await self._submitter()
        await submitter.send(groups[0] if isinstance(scored_data, Mapping) else groups, origin, by_http)

    async def _submitter(self) -> Submitter:
        if self._task is None or self._task.done():
            self._opened = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._keep_open(self._opened), name="penstock atropos transport")
        assert self._opened is not None  # noqa: S101 (set with the task)
        return await asyncio.shield(self._opened)

    async def _keep_open(self, opened: asyncio.Future[Submitter]) -> None:
        url = str(self._env.config.rollout_server_url).rstrip("/")
        name = f"environment {getattr(self._env, 'env_id', None)}"
        try:
            async with submitting(url, **self._access, name=name) as submitter:
                opened.set_result(submitter)
                await anyio.sleep_forever()
        except Exception as error:
            if opened.done():
                raise
            opened.set_exception(error)
