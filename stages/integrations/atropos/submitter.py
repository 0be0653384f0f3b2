"""Send groups to a gateway: `ShmTransport` from environments of Atropos, `submit` from others, without registration.

A gateway on this host gets them through shared memory, any other server of the contract over HTTP. A submission that is
sent again after a failure is accepted once: over HTTP by its idempotency key, through shared memory because a group is
sent again only where no gateway has received it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import anyio
import msgspec

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.channels.remote_sender import RemoteSender
from ...._pipeline.channels.transports import connect
from ...._pipeline.errors import (
    InvalidConfig,
    NobodyListens,
    OutOfSharedMemory,
    PeerClosed,
    PeerLost,
    PenstockError,
    RecordTooLarge,
    TooManySenders,
)
from ...._pipeline.graph.context import current
from ...._pipeline.util.exception_groups import unwrap_single
from ...._pipeline.util.waiting import Waiters
from ...._schemas import InvalidRecord, ProtocolMismatch, TrajectoryGroup
from ...._schemas.config import check_url
from ...http.retry import UNLIMITED, Backoff, jitter
from .api_error import AtroposAPIError, without_token
from .contract import scored_data
from .http_extra import load_http_api
from .translation import from_group, to_group

if TYPE_CHECKING:
    from .http_api import HttpApi

log = get_logger("penstock.atropos")

Group: TypeAlias = TrajectoryGroup | Mapping[str, Any]
"""A group, or a dict with the fields of Atropos' ScoredData."""

Send: TypeAlias = Callable[[Any], Awaitable[Any]]

E = TypeVar("E")

METHOD = "_send_scored_data_to_api"
"""The method of an environment that sends, behind all of its own filters."""

REQUEST_TIMEOUT_S = 60.0
"""Bound on one attempt."""

RECONNECT_TIMEOUT_S = 300.0
"""Bound on the time that a gateway may be unreachable, or have no room."""

LATEST = 2**63 - 1
"""Policy version of a group without one: a gateway replaces it by its current step."""

SHM_RECONNECT_TIMEOUT_S = 60.0
"""Bound on the time that a gateway may be unreachable before `sent` raises."""

RETRIES = Backoff(UNLIMITED, 0.05, 1.0)
"""Pauses between attempts to reach a gateway; there is no event to wait for."""

ATTEMPTS = 2
"""Attempts to connect for the first time; the gateway may end between its answer and the handshake."""


class GatewayDisconnected(PenstockError):
    """A gateway on this host disconnected, and may not have received all groups that were sent to it."""


async def submit(url: str, groups: Group | Sequence[Group], *, token: str | None = None, ca: str | None = None) -> None:
    """Send one group, or several, to the gateway at `url`, and return when the gateway has them.

    Each call opens a connection; see `submitting` for many calls.

    Args:
        url: http:// or https://, with host and port.
        groups: over HTTP they lose values without a field in the contract: policy versions, names, parts of rewards.
        token: the gateway's; by default PENSTOCK_TOKEN.
        ca: file with the certificates of a CA for https://, in PEM; None for those of the system.

    Raises:
        AtroposAPIError: the gateway refused them, or was unreachable for too long.
        GatewayDisconnected: the gateway on this host disconnected before it had them.
        InvalidRecord: a dict has no JSON form.
        InvalidConfig: `url` is not an address, or `ca` cannot be read.
        MissingExtra: aiohttp is not installed.
        NobodyListens: the gateway on this host disconnected, and did not return in time.
    """
    async with submitting(url, token=token, ca=ca) as submit_to:
        await submit_to(groups)


@asynccontextmanager
async def submitting(
    url: str, *, token: str | None = None, ca: str | None = None, name: str = "submitter"
) -> AsyncGenerator[Submitter]:
    """Open a connection to the gateway at `url` within the `async with`; for arguments and errors see `submit`.

        async with submitting("http://127.0.0.1:8000") as submit_to:
            await submit_to(group)

    `name` is the sender's in the gateway's log. Leaving waits until the gateway has everything that was sent.
    """
    check_url(url, "url")
    timeouts = {"request_timeout_s": REQUEST_TIMEOUT_S, "reconnect_timeout_s": RECONNECT_TIMEOUT_S}
    async with load_http_api("submit").open(url, token=token, ca=ca, **timeouts) as api:
        await api.check_server()
        sender = ShmSender(without_token(url), api.shm_url, name)
        with unwrap_single():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sender.run)
                try:
                    yield Submitter(api, sender)
                finally:
                    sender.close()


class Submitter:
    """Sends groups to one gateway; see `submitting`."""

    def __init__(self, api: HttpApi, sender: ShmSender) -> None:
        self._api = api
        self._sender = sender
        self._run = secrets.token_hex(4)
        """Part of every instance id, so that ids are unique among submitters."""
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        return repr(self._sender).replace("ShmSender", "Submitter")

    async def __call__(self, groups: Group | Sequence[Group]) -> None:
        """Send one group, or several; for errors see `submit`."""
        await self.send(groups, {"env": "atropos", "policy_version": LATEST})

    async def send(
        self,
        groups: Group | Sequence[Group],
        origin: Mapping[str, Any],
        foreign: Send | None = None,
    ) -> None:
        """Send groups; `origin` are arguments of `to_group`, `foreign` sends to a server that is no gateway."""
        listed = [groups] if isinstance(groups, Mapping | TrajectoryGroup) else list(groups)
        left = [group for group in listed if not await self._sender.sent(partial(self._record, group, origin))]
        if left and foreign is not None and not self._sender.to_gateway:
            await foreign(groups if len(left) == len(listed) else left)
        elif left:
            body = _json(left[0]) if len(left) == 1 else b"[%b]" % b",".join(map(_json, left))
            await self._api.submit(body, to_gateway=self._sender.to_gateway)

    def _record(self, group: Group, origin: Mapping[str, Any]) -> TrajectoryGroup:
        if isinstance(group, TrajectoryGroup):
            return group
        return to_group(scored_data(group), instance_id=f"{self._run}.{next(self._numbers)}", **origin)


def _json(group: Group) -> bytes:
    if isinstance(group, TrajectoryGroup):
        return from_group(group)
    try:
        return msgspec.json.encode(group)
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidRecord(f"expected a group that has a JSON form, got one without: {error}") from None


# -- through shared memory ---------------------------------------------------------------------------------------------


class ShmSender:
    """A connection to a gateway's `ShmReceiver`, reopened after a restart of the gateway; sends while `run` runs.

    Where shared memory cannot be used it logs that once, and the caller sends over HTTP.

    Args:
        url: the address of the server, for messages.
        receiver_url: returns the address of the gateway's receiver, None if the server is no gateway; raises OSError if
            it does not answer, AtroposAPIError if it refuses to.
        name: of this sender, in the gateway's messages.
    """

    def __init__(self, url: str, receiver_url: Callable[[], Awaitable[str | None]], name: str) -> None:
        self.to_gateway = True
        """False once the server is known to be no penstock gateway."""
        self._url = url
        self._receiver_url = receiver_url
        self._name = name
        self._sender: RemoteSender[TrajectoryGroup] | None = None
        """None while there is no connection."""
        self._connected_before = False
        """True once there was a connection: then the gateway is on this host."""
        self._unusable: str | None = None
        """Reason that groups go over HTTP; None otherwise."""
        self._changed = Waiters()
        self._closing = anyio.Event()
        self._lost = 0
        """Groups that were sent and not yet released by a gateway that disconnected."""

    def __repr__(self) -> str:
        state = self._unusable or ("open" if self._sender is not None else "not open")
        return f"<ShmSender to {self._url}: {state}>"

    async def sent(self, make: Callable[[], TrajectoryGroup]) -> bool:
        """Send the group that `make` returns, and wait for credit if need be; return False where HTTP must be used.

        Cancelled, it has not sent the group.

        Raises:
            NobodyListens: the gateway disconnected, and did not return in time.
        """
        while (sender := await self._connected()) is not None:
            try:
                await sender.send(make())
            except (
                InvalidRecord,
                RecordTooLarge,
            ) as error:  # over HTTP the gateway answers with the reason, or has room
                log.warning("group_sent_over_http", sender=self._name, reason=str(error))
                return False
            except (PeerClosed, PeerLost):
                while self._sender is sender:
                    await self._changed.wait()
            else:
                return True
        return False

    async def _connected(self) -> RemoteSender[TrajectoryGroup] | None:
        if self._sender is not None or self._unusable is not None:
            return self._sender
        with anyio.move_on_after(SHM_RECONNECT_TIMEOUT_S):
            while self._sender is None and self._unusable is None:
                await self._changed.wait()
        if self._sender is None and self._unusable is None:
            raise NobodyListens(
                f"expected the gateway at {self._url} to return, got no connection for {SHM_RECONNECT_TIMEOUT_S:g} s: "
                f"is its process running, at the same address?"
            )
        return self._sender

    def close(self) -> None:
        """Make `run` return once the gateway has received everything that was sent."""
        self._closing.set()

    async def run(self) -> None:
        """Look for the gateway, hold the connection, and look again when it is lost; return without a gateway.

        Raises:
            GatewayDisconnected: a gateway disconnected that may not have received all groups.
        """
        await self._stay_connected()
        if self._lost:
            raise GatewayDisconnected(
                f"expected the gateway at {self._url} to receive every group, got {self._lost} that it may not have "
                f"received when it disconnected; groups that it had received and not trained are lost, too"
            )

    async def _stay_connected(self) -> None:
        draw = jitter(current().worker)
        pauses, attempts = RETRIES.pauses(draw), 0
        while self._unusable is None and not self._closing.is_set():
            try:
                if (url := await self._receiver_url()) is None:
                    self.to_gateway = False
                    self._use_http("the server is no gateway of penstock")
                    return
                async with connect(url, TrajectoryGroup, name=self._name) as sender:
                    pauses, attempts, self._connected_before = RETRIES.pauses(draw), 0, True
                    await self._hold(sender)
                self._note_lost(sender)
            except AtroposAPIError as error:
                self._use_http(error.summary)
            except (OutOfSharedMemory, ProtocolMismatch, TooManySenders) as error:
                self._use_http(f"the gateway's shared memory cannot be used: {error}")
            except (NobodyListens, PeerClosed) as error:
                attempts += 1
                if not self._connected_before and attempts == ATTEMPTS:
                    self._use_http(f"the gateway is on another host, or refuses senders: {error}")
            except (OSError, PeerLost) as error:  # a TimeoutError is an OSError
                log.debug("gateway_unreachable", url=self._url, reason=str(error))
            with anyio.move_on_after(next(pauses)):
                await self._closing.wait()

    async def _hold(self, sender: RemoteSender[TrajectoryGroup]) -> None:
        """Let groups be sent, until the gateway disconnects or this sender is closed."""
        self._sender = sender
        self._changed.wake_all()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_at_close, tasks.cancel_scope)
                await sender.wait_failed()
                tasks.cancel_scope.cancel()
        finally:
            self._sender = None
            self._changed.wake_all()

    def _note_lost(self, sender: RemoteSender[TrajectoryGroup]) -> None:
        if sender.failure is not None:
            items = sender.statistics().items  # groups that the gateway had taken are lost too; it alone knew of them
            log.warning("gateway_disconnected", url=self._url, reason=str(sender.failure), groups_in_transit=items)
            self._lost += items

    async def _cancel_at_close(self, scope: anyio.CancelScope) -> None:
        await self._closing.wait()
        scope.cancel()

    def _use_http(self, reason: str) -> None:
        log.warning("sending_over_http", url=self._url, reason=reason)
        self._unusable = reason
        self._changed.wake_all()


# -- from environments of Atropos --------------------------------------------------------------------------------------


class ShmTransport:
    """Mixed in before an environment's class, or attached to an environment, it sends through shared memory.

        class MyEnv(ShmTransport, TheirEnv): ...
        env = ShmTransport.attach(TheirEnv(config, servers))

    It overrides the one method behind all of the environment's own filters. Registration and flow control stay HTTP,
    so the gateway knows the environment, and reports the true depth to it. To a gateway on another host groups go over
    HTTP, after one warning; to a server that is no gateway the environment itself sends them. Uses only the names
    `config`, `env_id` and `curr_step` of Atropos.
    """

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        parent: Any = super()
        await _connection_of(self).send(scored_data, getattr(parent, METHOD))

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse an order of bases that would call the environment's own method, and not this one.

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
            InvalidConfig: it is no environment of Atropos.
        """
        by_http = getattr(env, METHOD, None)
        if by_http is None:
            raise InvalidConfig(f"env: expected an environment of Atropos, with {METHOD}, got a {type(env).__name__}")
        connection = _connection_of(env, token, ca)
        if isinstance(env, ShmTransport):
            return env

        async def send(scored_data: Any) -> None:
            await connection.send(scored_data, by_http)

        setattr(env, METHOD, send)
        return env


def _connection_of(env: Any, token: str | None = None, ca: str | None = None) -> _ShmConnection:
    """Return the connection of `env`. It opens with the first group: after the environment has registered."""
    connection = vars(env).get("_penstock_connection")
    if connection is None:
        connection = env._penstock_connection = _ShmConnection(env, token, ca)  # noqa: SLF001 (a name Atropos has no use for)
    return cast("_ShmConnection", connection)


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

    async def send(self, scored_data: Mapping[str, Any] | Sequence[Mapping[str, Any]], by_http: Send) -> None:
        """Send one group, or several, waiting for credit if need be. Cancelled, it has not sent the current group.

        Raises:
            AtroposAPIError: the gateway refused it, or was unreachable for too long.
            NobodyListens: the gateway on this host disconnected, and did not return in time.
        """
        env, env_id = self._env, getattr(self._env, "env_id", None)
        name = getattr(env.config, "wandb_name", None) or type(env).__name__  # the gateway replaces it
        origin = {"env": str(name), "policy_version": getattr(env, "curr_step", 0)}
        submitter = await self._submitter()
        if isinstance(scored_data, Mapping):
            await submitter.send({**scored_data, "env_id": env_id}, origin, by_http)
        else:
            await submitter.send([{**each, "env_id": env_id} for each in scored_data], origin, by_http)

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
