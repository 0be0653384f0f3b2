"""The reception of a receiver: who comes to its door is introduced, let in or refused, and stayed with until it goes.

Whoever comes may be a stranger, or hostile: an introduction has a deadline, only so many may be under way at a time,
and what was refused is counted and told, but not so often that telling it becomes the harm.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

import anyio
from anyio.abc import Listener, SocketStream

from ...schemas import ProtocolMismatch, TokenizerIdentity
from ...schemas.control import PROTOCOL_VERSION, Hello, Ready, Refused, printable
from ...schemas.tokenizer import disagreements
from ..errors import (
    MemberNameInUse,
    MemberNameRequired,
    OutOfSharedMemory,
    PeerClosed,
    StaleDescriptor,
    TooManyMembers,
)
from ..telemetry import get_logger
from .carrier import HANDSHAKE_S, Inlet
from .door import Door, serve_door
from .keys import Key

__all__ = ["Enter", "Reception", "Refusals"]

log = get_logger("penstock.channel")

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
"""The part of an introduction that differs by carrier."""

G = TypeVar("G")


class Refusals:
    """Counts what was refused, and tells of the first few, then of every second as many."""

    TOLD = 8

    def __init__(self, url: str) -> None:
        self.count = 0
        self._url = url

    def note(self, reason: str) -> None:
        """Something was refused."""
        self.count += 1
        if self.count <= self.TOLD or not self.count & (self.count - 1):
            log.warning(
                "peer_rejected", url=self._url, reason=printable(reason).replace("\n", "\\n"), rejected=self.count
            )


class Reception(Generic[G]):
    """Serves a door. Those who are let in are made guests by `admit`; `gone` is told when one's door is closed.

    What `gone` returns is for a guest that was shown out, and may hear it later.
    """

    def __init__(
        self,
        guests: Collection[bytes],
        admit: Callable[[Hello, Door, Inlet], G],
        gone: Callable[[G], Exception | None],
        check: Callable[[Hello], None],
        refusals: Refusals,
        *,
        carrier: str,
        kind: str,
        most: int,
        key: Key | None,
        tokenizer: TokenizerIdentity | None,
    ) -> None:
        self.entering = 0
        """Introductions under way."""
        self.joined = 0
        """Introductions that came to a good end."""
        self._guests = guests
        """The identities of those who are in."""
        self._admit = admit
        self._gone = gone
        self._check = check
        """Raises where a sender may not join, before and after it has said all."""
        self._refusals = refusals
        self._carrier = carrier
        self._kind = kind
        self._most = most
        self._key = key
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<Reception of {self._kind}s over {self._carrier}: {self.joined} let in, {self.entering} entering>"

    async def serve(self, listener: Listener[SocketStream], enter: Enter) -> None:
        """Attend to whoever comes, for ever; `enter` completes a carrier's introduction."""

        async def attend(door: Door) -> None:
            await self._attend(door, enter)

        async with listener:
            await serve_door(listener, attend, self._refusals.note)

    async def _attend(self, door: Door, enter: Enter) -> None:
        if self.entering >= self._most + MOST_INTRODUCTIONS:
            self._refusals.note(f"{self.entering} others are being introduced")
            return
        guest = await self._introduced(door, enter)
        if guest is not None:
            await self._until_gone(door)
            if (error := self._gone(guest)) is not None:
                await _tell(door, error)

    async def _introduced(self, door: Door, enter: Enter) -> G | None:
        self.entering += 1
        try:
            with anyio.fail_after(HANDSHAKE_S):
                guest = await self._let_in(door, enter)
        except _FAILED_INTRODUCTIONS as error:
            self._refusals.note(f"introduction failed: {type(error).__name__}: {error}")
            await _tell(door, error)
            return None
        finally:
            self.entering -= 1
        self.joined += guest is not None
        return guest

    async def _let_in(self, door: Door, enter: Enter) -> G | None:
        if self._key is not None:
            await door.greet(self._key, "receiver")
        hello = await door.hear()
        if not isinstance(hello, Hello):
            raise ProtocolMismatch(f"expected a Hello, got {type(hello).__name__}")
        refusal = self._refusal(door, hello)
        if refusal is not None:
            self._refusals.note(f"{hello.name} (pid {hello.pid}): {refusal.reason}")
            await door.say(refusal)
            return None
        self._check(hello)
        inlet = await enter(door)
        if hello.identity in self._guests:
            raise ProtocolMismatch("expected an identity of its own, got one that was taken meanwhile")
        self._check(hello)
        return self._admit(hello, door, inlet)

    def _refusal(self, door: Door, hello: Hello) -> Refused | None:
        if not door.same_user:
            return Refused("PeerClosed", "expected a process of the same user")
        if hello.version != PROTOCOL_VERSION:
            versions = f"expected protocol version {PROTOCOL_VERSION}, got {hello.version}"
            return Refused("ProtocolMismatch", f"{versions}: install the same penstock on both sides")
        if (hello.carrier, hello.kind) != (self._carrier, self._kind):
            expected = f"{self._kind} over {self._carrier}"
            return Refused("ProtocolMismatch", f"expected {expected}, got {hello.kind} over {hello.carrier}")
        if len(self._guests) + self.entering > self._most:
            return Refused("TooManySenders", f"expected at most {self._most} senders: raise max_senders")
        if hello.identity in self._guests:
            return Refused("PeerClosed", "the identity is taken")
        parts = [("the receiver", self._tokenizer), (hello.name, hello.tokenizer)]
        known = [(name, tokenizer) for name, tokenizer in parts if tokenizer is not None]
        differing = "".join(disagreements(known))
        return Refused("TokenizersDiffer", differing) if differing else None

    async def _until_gone(self, door: Door) -> None:
        """Tell a sender that it is let in, and stay with it; it may die at any moment, this one included."""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream, ProtocolMismatch):
            await door.say(Ready())
            await door.hear()


async def _tell(door: Door, error: Exception) -> None:
    """Say why somebody is not, or no longer, let in, to whoever still listens."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError), anyio.move_on_after(FAREWELL_S):
        await door.say(Refused(type(error).__name__, str(error)))
