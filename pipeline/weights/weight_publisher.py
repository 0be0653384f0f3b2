"""`WeightPublisher`: publish versions of weights to subscribers; the trainer's side.

The publisher owns a segment of shared memory (`weights`) and a control socket (`weight_connection`). A subscriber that
connects receives the segment's descriptor and stays connected: it is notified of new versions and of pauses, and each
side detects at once when the other one dies. Messages are decoded by msgspec.

    async with WeightPublisher(model) as publisher:
        await publisher.publish(model.state_dict(), version=0)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import SocketListener, TaskGroup

from ..._schemas.control import check_name
from ..._schemas.numbers import finite_number
from ..channels.control_connection import serve_control
from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..channels.keys import ChannelKey
from ..util.blocking import enter_in_thread
from ..util.file_descriptors import available
from .engine_sync import Syncable, synced
from .tensor_layout import WritePlan
from .tensor_manifest import manifest_of
from .weight_address import WeightAddress
from .weight_connection import listening_socket
from .weight_serving import serving
from .weight_specs import FusedTensor, Tensor
from .weight_subscriptions import RELEASE_TIMEOUT_S, Subscriptions
from .weights import NO_VERSION, WeightWriter

if TYPE_CHECKING:
    from torch import nn

DESCRIPTORS = 8
"""File descriptors that opening takes: the segment, the socket and its folder, and temporary ones."""

PAUSE_TIMEOUT_S = 60.0
"""Seconds that subscribers have to stop sampling: longer than a long completion takes."""


E = TypeVar("E", bound=Syncable)


class WeightPublisher:
    """Publishes versions of one set of tensors to any number of subscribers on this host.

    A subscriber that copies never delays `publish`. One whose model is views has `release_timeout_s` to end its present
    batch and to load the newer version; a dead one is not waited for, and samples of one that takes longer are invalid.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        *,
        fused: Iterable[FusedTensor] = (),
        cast: Mapping[str, str] = MappingProxyType({}),
        device: str = "cpu",
        release_timeout_s: float = RELEASE_TIMEOUT_S,
        name: str | None = None,
    ) -> None:
        """Prepare to publish tensors like those of `model`.

        Args:
            model: the module whose `state_dict` will be published. Its non-persistent buffers are not published, but
                samplers whose own differ from their present values are refused. Or a `state_dict`, with the names,
                dtypes and shapes that will be published: then those buffers are not compared. Tied tensors are
                published under each of their names, and stored once.
            fused: tensors that the samplers' models have in one piece.
            cast: dtypes that are published as another one: `{"float32": "bfloat16"}`. No other dtype is ever cast.
            device: the device of the versions: "cpu", or "cuda:0" for samplers on that device.
            release_timeout_s: seconds that `publish` waits for a sampler to leave the buffer that is written next.
            name: of this publisher, for messages.

        Raises:
            InvalidConfig: seconds that are not finite, a value that is no tensor, a buffer on the meta device, or a
                dtype, also in `cast`, that cannot be published.
            WeightsMismatch: `fused` does not fit the tensors.
        """
        self._plan = WritePlan(manifest_of(model), fused, cast)
        self._device = device
        self._writer: WeightWriter | None = None
        self._subscriptions = Subscriptions(
            check_name(name or f"publisher in process {os.getpid()}"),
            finite_number("release_timeout_s", release_timeout_s, zero=True),
        )
        self._publishing = anyio.Lock()
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        state = "paused" if self._subscriptions.pause else "open" if self._writer else "closed"
        return f"<WeightPublisher {self.url} {state}: version {self.version}, {len(self.subscribers)} subscribers>"

    async def __aenter__(self) -> Self:
        """Allocate the segment and open the control socket.

        Raises:
            OutOfSharedMemory: the machine has no room for the weights, twice.
            NoDevice: this process cannot use `device`.
            OutOfFileDescriptors: this process has too few left.
            DiskFull, NotWritable: the folder for the socket cannot be written; the message names it.
        """
        available(DESCRIPTORS, "a publisher of weights")
        async with AsyncExitStack() as stack:
            self._writer = await anyio.to_thread.run_sync(WeightWriter, self._plan, self._device)
            stack.callback(self._close)
            url, connection = await enter_in_thread(stack, listening_socket())
            self._subscriptions.open(self._writer, url)
            listener = await stack.enter_async_context(await SocketListener.from_socket(connection))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(serve_control, listener, self._subscriptions.accept, self._subscriptions.rejections)
            stack.push_async_callback(self._notify_end, tasks)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Notify every subscriber that no newer version follows, and close. They keep their weights."""
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The URL for subscribers, while it is open."""
        return self._subscriptions.url

    @property
    def name(self) -> str:
        """The name of this publisher, for messages."""
        return self._subscriptions.name

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tied tensors, each with that of the earlier tensor with the same memory."""
        return self._plan.ties

    @property
    def version(self) -> int:
        """The newest version that was published; −1 before the first."""
        return self._writer.latest if self._writer else NO_VERSION

    @property
    def subscribers(self) -> list[str]:
        """Names of the connected subscribers."""
        return sorted(subscription.name for subscription in self._subscriptions.all)

    async def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make `tensors` the newest weights. Copies in a worker thread; if cancelled, it has published all or none.

        Waits, up to `release_timeout_s`, until models that are views of the version before the last have loaded the
        last.

        Args:
            tensors: the same names, dtypes and shapes as at construction; they must not change until this returns.
            version: the optimizer step that computed them; above every earlier version.

        Raises:
            WeightsMismatch: the tensors differ from those at construction; lists all differences.
            InvalidConfig: `version` is not newer than the last.
            anyio.ClosedResourceError: the publisher is not open.
        """
        async with self._publishing:
            writer = self._opened()
            check = partial(self._plan.check, newest=writer.latest)
            await anyio.to_thread.run_sync(check, tensors, version)
            await self._subscriptions.released(writer.sequence - 1)
            try:
                await anyio.to_thread.run_sync(writer.write, tensors, version)
            finally:
                self._subscriptions.wake_all()

    @asynccontextmanager
    async def paused(self, pause_timeout_s: float = PAUSE_TIMEOUT_S) -> AsyncIterator[None]:
        """Pause sampling within the body: every subscriber has stopped and confirmed that. Sampling resumes afterwards.

        A subscriber that dies is not waited for; one that subscribes meanwhile begins paused.

        Raises:
            TimeoutError: a subscriber did not stop within `pause_timeout_s`; the message names it. Sampling resumes.
        """
        timeout_s = finite_number("pause_timeout_s", pause_timeout_s, zero=True)
        async with self._subscriptions.paused(timeout_s):
            yield

    @asynccontextmanager
    async def serve(
        self,
        url: str,
        *,
        key: ChannelKey | None = None,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        trusted_link: bool = False,
    ) -> AsyncIterator[WeightAddress]:
        """Serve the versions to samplers on other hosts within the body; yield the address to give to samplers.

        Each host receives a version once, for all its samplers. On the host of this publisher the address leads to
        its shared memory. `publish` never waits for the network; `paused` also pauses the samplers of other hosts.

        Args:
            url: `tcp://HOST:PORT`, with an address of this host for other hosts; port 0 chooses one.
            key: the key that samplers must have too, and get with the address; on loopback this user's key is used by
                default.
            heartbeat_timeout_s: seconds without a sign of life until a connection is taken for cut, and made again. A
                sign of life is sent every third of it; this also keeps proxies from closing idle connections.
            trusted_link: nobody but you can read or change what travels between the hosts: both ends prove that they
                have the key, and nothing is encrypted.

        Raises:
            InvalidConfig: `heartbeat_timeout_s` is not above 0 and finite, the URL is not such a one, or one of a host
                beyond loopback without a key, or the versions lie on a device.
            OSError: the port is in use, or no address belongs to this machine.
            InvalidKey, KeyUnavailable: this user's key cannot be used; the message names the file.
            anyio.ClosedResourceError: the publisher is not open.
        """
        timeout_s = finite_number("heartbeat_timeout_s", heartbeat_timeout_s)
        writer, subscriptions = self._opened(), self._subscriptions
        async with serving(url, key, timeout_s, writer, subscriptions, trusted_link=trusted_link) as address:
            yield address

    def sync(self, engine: E) -> AbstractAsyncContextManager[E]:
        """Wake `engine` and load the newest version for the body; let it sleep afterwards, in any case.

        See `engine_sync.synced` for exceptions.
        """
        return synced(self, engine)

    def _opened(self) -> WeightWriter:
        if self._writer is None:
            raise anyio.ClosedResourceError
        return self._writer

    async def _notify_end(self, tasks: TaskGroup) -> None:
        """Notify all subscribers of the end, then stop."""
        await self._subscriptions.notify_end()
        tasks.cancel_scope.cancel()

    def _close(self) -> None:
        self._subscriptions.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
