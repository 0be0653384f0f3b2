"""submit: send groups to a gateway from environments that are not Atropos'. No pipeline and no registration is needed.

A gateway on this host gets them through shared memory, any other server of the contract over HTTP. A submission that is
sent again after a failure is accepted once: over HTTP by its idempotency key, through shared memory because a group is
sent again only where no gateway has received it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec

from ....pipeline.causes import alone
from ....schemas import InvalidRecord, TrajectoryGroup
from ....schemas.config import check_url
from .api_error import load_http_api, without_token
from .contract import scored_data
from .shm.sender import ShmSender
from .translation import from_group, to_group

if TYPE_CHECKING:
    from .http_api import HttpApi

__all__ = ["Submitter", "submit", "submitting"]

Group: TypeAlias = TrajectoryGroup | Mapping[str, Any]
"""A group, or a dict with the fields of Atropos' ScoredData."""

REQUEST_TIMEOUT_S = 60.0
"""Bound on one attempt."""

RECONNECT_TIMEOUT_S = 300.0
"""Bound on the time that a gateway may be away, or have no room."""

LATEST = 2**63 - 1
"""Policy version of a group that comes without one: a gateway takes its current step for it."""


async def submit(url: str, groups: Group | Sequence[Group], *, token: str | None = None, ca: str | None = None) -> None:
    """Send one group, or several, to the gateway at `url`, and return when the gateway has them.

    Each call opens a connection; see `submitting` for many calls.

    Args:
        url: http:// or https://, with host and port.
        groups: over HTTP they lose what the contract has no field for: policy versions, names, parts of rewards.
        token: the gateway's; by default PENSTOCK_TOKEN.
        ca: file with the certificates of a CA, in PEM, which https:// is to trust; None for those of the system.

    Raises:
        AtroposAPIError: the gateway refused them, or was away for too long.
        GatewayGone: the gateway on this host went away with them.
        InvalidRecord: a dict has no JSON form.
        InvalidConfig: `url` is not an address, or `ca` cannot be read.
        MissingExtra: aiohttp is not installed.
        NobodyListens: the gateway on this host went away, and did not come back in time.
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

    `name` is what the gateway's log calls the sender. Leaving waits until the gateway has everything that was sent.
    """
    check_url(url, "url")
    timeouts = {"request_timeout_s": REQUEST_TIMEOUT_S, "reconnect_timeout_s": RECONNECT_TIMEOUT_S}
    async with load_http_api("submit").open(url, token=token, ca=ca, **timeouts) as api:
        await api.greet()
        sender = ShmSender(without_token(url), api.shm_url, name)
        with alone():
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
        """Part of every instance id, so that no other submitter has the same ids."""
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
        foreign: Callable[[Any], Awaitable[Any]] | None = None,
    ) -> None:
        """Send groups; `origin` are arguments of `to_group`, `foreign` sends where the server is no gateway."""
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
