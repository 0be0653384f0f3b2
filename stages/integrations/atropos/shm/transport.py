"""ShmTransport: an environment of Atropos on the gateway's host sends its groups through shared memory.

What it overrides is the one method behind all of the environment's own filters; registration and flow control stay
HTTP, so the gateway knows the environment, and tells it the true depth. Knows Atropos by names only: `config`,
`env_id`, `curr_step`. A group is sent by one way or the other, never by both, and whole.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar, cast

import anyio
import msgspec

from .....pipeline.channels.carriers import connect
from .....pipeline.channels.remote_sender import RemoteSender
from .....pipeline.errors import (
    MissingExtra,
    NobodyListens,
    OutOfSharedMemory,
    PeerClosed,
    PeerLost,
    RecordTooLarge,
    TooManySenders,
)
from .....pipeline.telemetry import get_logger
from .....pipeline.waiting import Waiters
from .....schemas import InvalidRecord, ProtocolMismatch, TrajectoryGroup
from ..api_error import shown
from ..contract import scored_data
from ..translation import to_group
from .shm_way_in import PATH, WayInAnswer

__all__ = ["ShmTransport"]

log = get_logger("penstock.atropos")

METHOD = "_send_scored_data_to_api"

ANSWER_S = 10.0
"""How long the gateway may take to say where its way in is."""

PATIENCE_S = 60.0
"""How long a gateway that went away may take to come back before a group's `send` raises: BaseEnv then drops it."""

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0
"""A gateway that is not there is no event to wait for."""

ATTEMPTS = 2
"""Strangers are tried so often, for a gateway may end between its answer and the knock at its door."""

Scored: TypeAlias = Mapping[str, Any]
Send: TypeAlias = Callable[[Any], Awaitable[Any]]

E = TypeVar("E")


class ShmTransport:
    """Mixed in before an environment's class, or attached to an environment, it sends through shared memory.

        class MyEnv(ShmTransport, TheirEnv): ...
        env = ShmTransport.attach(TheirEnv(config, servers))

    Where the server is on another host, or is no gateway of penstock, groups go over HTTP, after one warning.
    """

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        parent: Any = super()
        await _line_of(self).send(scored_data, getattr(parent, METHOD))

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse an order of bases in which the environment's own method would be called, and this one never.

        Raises:
            TypeError: naming the class that has to stand behind.
        """
        super().__init_subclass__(**options)
        order = cls.__mro__[1:]
        before = [base for base in order[: order.index(ShmTransport)] if METHOD in vars(base)]
        if before and not any(METHOD in vars(base) for base in order[order.index(ShmTransport) + 1 :]):
            name = before[0].__name__
            raise TypeError(f"expected class {cls.__name__}(ShmTransport, {name}), got {name} before ShmTransport")

    @staticmethod
    def attach(env: E) -> E:
        """Have `env`, and no other environment of its class, send through shared memory; returns it.

        Raises:
            TypeError: it is no environment of Atropos.
        """
        by_http = getattr(env, METHOD, None)
        if by_http is None:
            raise TypeError(f"expected an environment of Atropos, with {METHOD}, got a {type(env).__name__}")
        if isinstance(env, ShmTransport):
            return env
        line = _line_of(env)

        async def send(scored_data: Any) -> None:
            await line.send(scored_data, by_http)

        setattr(env, METHOD, send)
        return env


def _line_of(env: Any) -> _Line:
    """The environment's own; made when it sends for the first time, which is after it has registered."""
    line = vars(env).get("_penstock_line")
    if line is None:
        line = env._penstock_line = _Line(env)  # noqa: SLF001 (a name that Atropos has no use for)
    return cast("_Line", line)


class _Line:
    """An environment's way to its gateway: opened when it is first used, and again when the gateway comes back.

    A task of its own holds it, so that a worker which is cancelled, or a `cleanup()`, takes nothing down; it ends with
    the event loop.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._http = _aiohttp()
        self._sender: RemoteSender[TrajectoryGroup] | None = None
        """While there is a connection."""
        self._known = False
        """Whether there ever was one: then the gateway is on this host."""
        self._why_http: str | None = None
        """Why groups go over HTTP; None while they do not."""
        self._keeper: asyncio.Task[None] | None = None
        self._changed = Waiters()
        self._run = secrets.token_hex(4)
        """What tells this environment's groups from those of every other."""
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        state = self._why_http or ("open" if self._sender is not None else "not open")
        return f"<ShmTransport of {type(self._env).__name__} to {shown(self._url)}: {state}>"

    @property
    def _url(self) -> str:
        return str(self._env.config.rollout_server_url).rstrip("/")

    @property
    def _env_id(self) -> int | None:
        """What the gateway calls the environment; None before it has registered."""
        return cast("int | None", getattr(self._env, "env_id", None))

    async def send(self, scored_data: Scored | Sequence[Scored], by_http: Send) -> None:
        """Send one group, or several, waiting for credit if need be. Cancelled, it has not sent the group it was at.

        Raises:
            NobodyListens: the gateway went away, and did not come back in time.
        """
        groups = [scored_data] if isinstance(scored_data, Mapping) else scored_data
        left = [scored for scored in groups if not await self._sent(scored)]
        if left:
            await by_http(scored_data if len(left) == len(groups) else left)

    async def _sent(self, scored: Scored) -> bool:
        """Whether it could go through shared memory."""
        while (sender := await self._connected()) is not None:
            try:
                await sender.send(self._group(scored))
            except (InvalidRecord, RecordTooLarge) as error:  # the gateway says what is wrong with it, or has room
                log.warning("group_sent_over_http", env_id=self._env_id, reason=str(error))
                return False
            except (PeerClosed, PeerLost):
                while self._sender is sender:
                    await self._changed.wait()
            else:
                return True
        return False

    def _group(self, scored: Scored) -> TrajectoryGroup:
        env = self._env
        return to_group(
            scored_data({**scored, "env_id": self._env_id}),
            env=str(getattr(env.config, "wandb_name", None) or type(env).__name__),  # the gateway knows a better one
            instance_id=f"{self._run}.{next(self._numbers)}",
            policy_version=getattr(env, "curr_step", 0),
        )

    # -- the connection ------------------------------------------------------------------------------------------------

    async def _connected(self) -> RemoteSender[TrajectoryGroup] | None:
        """The connection, or None where groups are to go over HTTP.

        Raises:
            NobodyListens: there is none, and the gateway did not come back in time.
        """
        if self._sender is not None or self._why_http is not None:
            return self._sender
        keeper = self._keeper
        if keeper is None or keeper.done():
            self._keeper = keeper = asyncio.create_task(self._stay_connected(), name="penstock atropos transport")
            keeper.add_done_callback(lambda _: self._changed.wake_all())
        with anyio.move_on_after(PATIENCE_S):
            while self._sender is None and not keeper.done():
                await self._changed.wait()
        if keeper.done():
            keeper.result()
        elif self._sender is None:
            raise NobodyListens(
                f"expected the gateway at {shown(self._url)} to come back, got nothing for {PATIENCE_S:g} s: is its "
                f"process running, at the same address?"
            )
        return self._sender

    async def _stay_connected(self) -> None:
        """Look for the gateway, hold the connection, look again when it is gone; or find that there will be none."""
        retry_s, strangers = FIRST_RETRY_S, 0
        while True:
            try:
                url = await self._way_in()
                async with connect(url, TrajectoryGroup, name=f"environment {self._env_id}") as sender:
                    retry_s, strangers, self._known = FIRST_RETRY_S, 0, True
                    await self._hold(sender)
            except _NoGateway as error:
                self._fall_back(str(error))
            except (OutOfSharedMemory, ProtocolMismatch, TooManySenders) as error:
                self._fall_back(f"the gateway's shared memory cannot be used: {error}")
            except (NobodyListens, PeerClosed) as error:
                strangers += 1
                if not self._known and strangers == ATTEMPTS:
                    self._fall_back(f"the gateway is on another host, or lets nobody in: {error}")
            except (OSError, PeerLost, TimeoutError) as error:
                log.debug("gateway_not_there", url=shown(self._url), reason=str(error))
            if self._why_http is not None:
                return
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)

    async def _hold(self, sender: RemoteSender[TrajectoryGroup]) -> None:
        """Let groups be sent, until the gateway is gone."""
        self._sender = sender
        self._changed.wake_all()
        try:
            await sender.gone()
        finally:
            self._sender = None
            self._changed.wake_all()
        on_the_way = sender.statistics().items  # what it had taken is gone besides, and only it knew how much that was
        log.warning("gateway_gone", url=shown(self._url), reason=str(sender.failure), groups_on_the_way=on_the_way)

    def _fall_back(self, reason: str) -> None:
        log.warning("sending_over_http", url=shown(self._url), reason=reason)
        self._why_http = reason

    async def _way_in(self) -> str:
        """Where the gateway's channel is.

        Raises:
            _NoGateway: the server says that it has none.
            OSError, TimeoutError: it says nothing.
        """
        http, url = self._http, self._url + PATH
        said = f"expected a gateway of penstock at {shown(self._url)}"
        try:
            async with (
                http.ClientSession(timeout=http.ClientTimeout(total=ANSWER_S)) as session,
                session.get(url) as response,
            ):
                status, body = response.status, await response.read()
        except http.ClientError as error:
            raise OSError(f"{said}, got {error}") from error
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise OSError(f"{said}, got {status}")
        try:
            return msgspec.json.decode(body, type=WayInAnswer).url
        except msgspec.MsgspecError:
            raise _NoGateway(f"{said}, got {status} {body[:80]!r}") from None


def _aiohttp() -> Any:
    """What Atropos talks with too.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("aiohttp")
    except ImportError as error:
        raise MissingExtra(
            "ShmTransport needs aiohttp, which is not installed: pip install 'penstock[http]'"
        ) from error


class _NoGateway(Exception):
    """Whoever answers there has no way in through shared memory."""
