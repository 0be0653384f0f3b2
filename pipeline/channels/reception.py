"""Lets senders in over shm: each is introduced at the door, let in or refused, and watched until it ends or is silent.

Whoever comes may be a stranger, or hostile: an introduction has a deadline, and only so many may be under way at a
time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import anyio
from anyio.abc import Listener, SocketStream

from ...schemas import ProtocolMismatch
from ...schemas.control import Hello, Ready, Refused
from ..errors import (
    MemberNameInUse,
    MemberNameRequired,
    OutOfSharedMemory,
    PeerClosed,
    StaleDescriptor,
    TooManyMembers,
)
from .carrier import HANDSHAKE_S, Frames, Inlet
from .door import Door, serve_door
from .peer import Peer
from .registry import Registry
from .silence import Severances

__all__ = ["Enter", "Reception"]

MOST_INTRODUCTIONS = 64
"""Introductions under way at a time, beside those of as many senders as may come: each holds a file descriptor."""

FAREWELL_S = 1.0
"""How long a refusal may take to be heard: it is short, so only who does not read at all is not told."""

_FAILED_INTRODUCTIONS = (
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    MemberNameInUse,
    MemberNameRequired,
    OSError,
    OutOfSharedMemory,
    PeerClosed,
    ProtocolMismatch,
    StaleDescriptor,
    TimeoutError,
    TooManyMembers,
)

Enter: TypeAlias = Callable[[Door], Awaitable[Inlet]]
"""Completes an introduction: takes the sender's segment in."""


class Reception:
    """Serves a door: an `Acceptor`."""

    def __init__(
        self,
        registry: Registry,
        socket: Any,
        listener: Listener[SocketStream],
        enter: Enter,
        silence_s: float | None,
    ) -> None:
        self.entering = 0
        """Introductions under way."""
        self._registry = registry
        self._admission, self._refusals = registry.admission, registry.refusals
        self._socket = socket
        self._listener = listener
        self._enter = enter
        self._silence_s = silence_s
        self._severances = None if silence_s is None else Severances(socket, silence_s, self._look_for_the_silent)
        self._doorman = asyncio.get_running_loop().create_task(self._serve(), name="penstock receiver door")

    def __repr__(self) -> str:
        return f"<Reception: {self.entering} entering, {self._admission!r}>"

    def handle_unknown(self, identity: bytes, frames: Frames) -> None:
        """Count a message from an identity that was not let in at the door; see `Acceptor.handle_unknown`."""
        del identity, frames
        self._refusals.note("a message from a stranger")

    def admitted(self) -> None:
        """See to it that the newcomer's ZeroMQ connection comes in time; see `Acceptor.admitted`."""
        if self._severances is not None:
            self._severances.expect()

    async def aclose(self) -> None:
        """See `Acceptor.aclose`."""
        if self._severances is not None:
            self._severances.close()
        self._doorman.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await self._doorman
        finally:
            try:
                await self._listener.aclose()  # who leaves at once does so before the doorman has begun
            finally:
                self._socket.close()

    async def _serve(self) -> None:
        async with self._listener:
            await serve_door(self._listener, self._attend, self._refusals.note)

    async def _attend(self, door: Door) -> None:
        if self.entering >= self._admission.most + MOST_INTRODUCTIONS:
            self._refusals.note(f"{self.entering} others are being introduced")
            return
        guest = await self._introduced(door)
        if guest is not None:
            await self._until_gone(door)
            if (refused := self._registry.gone(guest)) is not None:
                await _tell(door, refused)

    async def _introduced(self, door: Door) -> Peer | None:
        self.entering += 1
        try:
            with anyio.fail_after(HANDSHAKE_S):
                return await self._let_in(door)
        except _FAILED_INTRODUCTIONS as error:
            self._refusals.note(f"introduction failed: {type(error).__name__}: {error}")
            await _tell(door, Refused(type(error).__name__, str(error)))
            return None
        finally:
            self.entering -= 1

    async def _let_in(self, door: Door) -> Peer | None:
        hello = await door.hear()
        if not isinstance(hello, Hello):
            raise ProtocolMismatch(f"expected a Hello, got {type(hello).__name__}")
        stranger = None if door.same_user else Refused("PeerClosed", "expected a process of the same user")
        refusal = stranger or self._admission.refusal(hello)
        if refusal is not None:
            self._refusals.note(f"{hello.name} (pid {hello.pid}): {refusal.reason}")
            await door.say(refusal)
            return None
        self._admission.check(hello)
        self._admission.granted += 1
        try:
            inlet = await self._enter(door)
            if hello.identity in self._registry.peers:
                raise ProtocolMismatch("expected an identity of its own, got one that was taken meanwhile")
            return self._admission.admit(hello, door, inlet)
        finally:
            self._admission.granted -= 1

    async def _until_gone(self, door: Door) -> None:
        """Tell a sender that it is let in, and stay with it; it may die at any moment, this one included."""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream, ProtocolMismatch):
            await door.say(Ready())
            await door.hear()

    def _look_for_the_silent(self) -> None:
        """A connection has ended. Whose door is still open has not died: it is given up as if it had."""
        self._registry.drain()
        for peer in list(self._registry.peers.values()):
            if peer.open and self._settled(peer) and not self._registry.reaches(peer):
                peer.silent_for = self._silence_s
                peer.control.hang_up()

    def _settled(self, peer: Peer) -> bool:
        """Whether the ZeroMQ connection of `peer` was there, or has had the time to come."""
        return peer.connected or time.monotonic() - peer.since >= (self._silence_s or 0)


async def _tell(door: Door, refused: Refused) -> None:
    """Say why somebody is not, or no longer, let in, to whoever still listens."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(FAREWELL_S):
        await door.say(refused)
