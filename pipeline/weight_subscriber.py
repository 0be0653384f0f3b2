"""The samplers' end of the way that weights take: a model is brought to the newest version that was published.

A subscriber knocks at the publisher's door, is handed its segment of shared memory, which it reads without asking
anyone, and stays connected to hear of versions, of pauses, and of the publisher's death.

    async with WeightSubscriber(url) as subscriber:  # publisher.url
        subscriber.attach(model.state_dict())
        await subscriber.newer()
        await anyio.to_thread.run_sync(subscriber.refresh)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread

from ..schemas import ProtocolMismatch
from ..schemas.control import PROTOCOL_VERSION, Final, Message, Pause, Paused, Refused, Resume, Subscribe, Weights
from .door import Door
from .errors import PeerClosed, PeerLost
from .waiting import Waiters
from .weight_door import knock
from .weights import NO_VERSION, Tensor, WeightReader, check_weights, specs_of

__all__ = ["WeightSubscriber"]


class WeightSubscriber:
    """The weights of a publisher in another process (or in this one), copied into a model when there are newer ones."""

    def __init__(self, url: str, *, name: str | None = None) -> None:
        """Prepare to subscribe at `url`; `name` says who this is, for messages."""
        self.url = url
        self.name = name or f"subscriber in process {os.getpid()}"
        self._stack = AsyncExitStack()
        self._reader: WeightReader | None = None
        self._publisher = url
        self._model: Mapping[str, Tensor] = {}
        self._memory: Any = None
        """One version, private: the model is touched only with a version that was read whole."""
        self._version = NO_VERSION
        self._failure: PeerLost | None = None
        self._final = False
        self._pause = 0
        """Number of the pause that is on; 0 where sampling may go on."""
        self._confirmed = 0
        self._active = 0
        """Bodies of `sampling` that run."""
        self._news = Waiters()
        """Wakes those who wait for a version or for the end of a pause."""
        self._answer = Waiters()
        """Wakes the task that confirms pauses."""

    def __repr__(self) -> str:
        state = "lost" if self._failure else "final" if self._final else "paused" if self._pause else "open"
        return f"<WeightSubscriber {self.url} {state}: version {self._version} of {self.latest}>"

    async def __aenter__(self) -> Self:
        """Knock, and map the publisher's segment.

        Raises:
            NobodyListens: there is no publisher at `url`.
            ProtocolMismatch: it refused, with its reason.
            PeerLost: it died or closed meanwhile.
        """
        async with AsyncExitStack() as stack:
            door = await stack.enter_async_context(await knock(self.url))
            try:
                await door.say(Subscribe(PROTOCOL_VERSION, self.name, os.getpid()))
                self._reader = await self._introduce(door)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                raise PeerLost(f"the publisher at {self.url} closed its door before it handed over weights") from None
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(self._listen, door)
            tasks.start_soon(self._confirm, door)
            stack.callback(tasks.cancel_scope.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave. The model keeps its weights."""
        await self._stack.aclose()

    async def _introduce(self, door: Door) -> WeightReader:
        said = await door.hear()
        if isinstance(said, Refused):
            raise ProtocolMismatch(f"the publisher at {self.url} refused: {said.reason}")
        fd = door.take_fd()
        if not isinstance(said, Weights) or fd is None:
            raise ProtocolMismatch(f"expected Weights with a file descriptor, got {type(said).__name__}")
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            self._publisher, self._pause, self._confirmed = said.name, said.pause, said.pause
            return await anyio.to_thread.run_sync(WeightReader, fd, said.nbytes, said.manifest_bytes)

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> int:
        """The newest version that was published; −1 before the first. A look into memory, no system call."""
        return self._reader.latest if self._reader else NO_VERSION

    @property
    def version(self) -> int:
        """The version that the attached tensors hold; −1 before the first `refresh`."""
        return self._version

    def attach(self, tensors: Mapping[str, Tensor]) -> None:
        """Say which tensors `refresh` fills, in place: a model's `state_dict`, or numpy arrays by name.

        Raises:
            WeightsMismatch: what is published differs in a name, dtype or shape; lists every difference.
            TypeError: a value is no tensor.
        """
        reader = self._opened()
        check_weights(specs_of(tensors), reader.specs, f"weights of {self._publisher} do not fit the model")
        self._model, self._memory, self._version = dict(tensors), reader.private_copy(), NO_VERSION

    def refresh(self) -> int:
        """Bring the attached tensors to the newest version, if they are older; return the version they hold.

        Blocks while it copies: call it in a worker thread, where nobody samples from the model meanwhile. The tensors
        never hold a mixture. A publisher that overtakes the copy again and again leaves them as they were.

        Raises:
            PeerLost: the publisher died, and the tensors hold its last version.
            RuntimeError: nothing is attached.
        """
        reader = self._opened()
        if self._memory is None:
            raise RuntimeError("expected tensors to refresh, got none: call attach(model.state_dict()) first")
        if reader.latest > self._version:
            version = reader.read_into(self._memory)
            if version != NO_VERSION:
                reader.load(self._memory, self._model)
                self._version = version
        elif self._failure is not None:
            raise self._failure
        return self._version

    async def newer(self, than: int | None = None) -> int:
        """Wait until a version above `than` is published (by default above the one the tensors hold); return it.

        Raises:
            PeerLost: the publisher died.
            PeerClosed: the publisher closed; its last version is not newer.
        """
        bound = self._version if than is None else than
        self._opened()
        while self.latest <= bound:
            self._check()
            if self._final:
                raise PeerClosed(f"{self._publisher} closed at version {self.latest}: nothing above {bound} will come")
            await self._news.wait()
        return self.latest

    def _opened(self) -> WeightReader:
        if self._reader is None:
            raise RuntimeError(f"expected an open subscriber, got {self!r}: use it within `async with`")
        return self._reader

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # -- pausing -------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether the publisher wants no sampling now."""
        return bool(self._pause)

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Sample within the body only: entering waits while the publisher pauses, and the pause waits for the body.

        Keep the body as short as the pause may have to wait: one batch of completions, or one token.

        Raises:
            PeerLost: the publisher died.
        """
        while self._pause:
            self._check()
            await self._news.wait()
        self._check()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._answer.wake_all()

    # -- the door ------------------------------------------------------------------------------------------------------

    async def _listen(self, door: Door) -> None:
        """Note what the publisher says, until it closes or dies."""
        try:
            while not self._final:
                self._note(await door.hear())
        except anyio.EndOfStream:
            self._failure = PeerLost(f"{self._publisher} at {self.url} died: its door is closed")
        except ProtocolMismatch as error:
            self._failure = PeerLost(f"{self._publisher} at {self.url} broke the protocol: {error}")
        self._news.wake_all()

    def _note(self, said: Message) -> None:
        if isinstance(said, Pause):
            self._pause = said.number
            self._answer.wake_all()
        elif isinstance(said, Resume | Final):
            self._pause = 0
            self._final = isinstance(said, Final)
        self._news.wake_all()

    async def _confirm(self, door: Door) -> None:
        """Tell the publisher, for each pause, when sampling has stopped."""
        try:
            while True:
                if self._active or self._pause in {0, self._confirmed}:
                    await self._answer.wait()
                else:
                    self._confirmed = self._pause
                    await door.say(Paused(self._confirmed))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the publisher is gone: `_listen` notices
