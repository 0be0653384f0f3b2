"""The receiving end of a channel from other processes: what shm and tcp have in common.

One ZeroMQ socket for all senders, and an acceptor that lets them in and notices when one is gone. Everything runs on
one event loop, except that a lease may die in any thread.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import anyio
import anyio.lowlevel
import zmq

from ..._schemas import InvalidRecord, Packer, ProtocolMismatch, TokenizerIdentity, TrainBatch
from ..._schemas.control import (
    PROTOCOL_VERSION,
    Accept,
    Close,
    CloseAck,
    Closed,
    Connect,
    CreditGrant,
    CreditRequest,
    Leaving,
    Message,
    Publish,
    Reject,
    Telemetry,
    decode_of_sender,
    encode,
    printable,
)
from ..._schemas.descriptor import Descriptor
from ..errors import MemberAbsent, PeerClosed, PeerLost, RecordCorrupted, StaleDescriptor
from ..telemetry import get_logger
from ..waiting import WaitClock, Waiters
from .admission import Admission, RejectionCounter
from .channel import ChannelStatistics
from .checksum import ChecksumDiffers
from .connection import Acceptor, PeerControl
from .credit_returns import CreditReturner
from .heartbeat import UNRESPONSIVE
from .keys import ChannelKey
from .members import Members
from .memory import CHECKPOINT_EVERY
from .peer import Peer
from .protocols import AsyncReceiver
from .segment import DEFAULT_SLOT_BYTES
from .transport import EVENTS, POLLIN, Bundle, Frames, PayloadReader, R

__all__ = ["PeerListener", "ReceiverConfig", "RemoteReceiver"]

log = get_logger("penstock.channel")

DRAIN_AT_ONCE = 1024
"""Messages after which other tasks get their turn: senders within their credit never have so many on the way."""

RELEASE_AT = 32
"""Records whose credit goes back unasked, where half of the capacity is more."""


class PeerListener(Protocol):
    """Who is told what happens to senders, in the order in which it happened; a pipeline, mostly."""

    def received(self, peer: Peer, record: Any) -> Any:
        """`record` came: what of it `receive` is to return; None for nothing."""
        ...

    def observed(self, peer: Peer, payload: bytes) -> None:
        """The sender passed on what its process observed."""
        ...

    def lost(self, peer: Peer, error: PeerLost) -> None:
        """The sender died; all that it had published was received before."""
        ...

    def closed(self, peer: Peer) -> None:
        """The sender said goodbye; all that it had sent was received before."""
        ...

    def disconnected(self, peer: Peer) -> None:
        """The connection has ended of a sender that had said goodbye."""
        ...


Notice: TypeAlias = PeerLost | Literal["closed", "disconnected"]
"""No more will come from a sender: it died, or said goodbye; or it had, and now its connection has ended."""

Event: TypeAlias = tuple[Peer, Bundle | Notice]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """On what terms senders are let in; see `serve`."""

    capacity: int
    capacity_bytes: int
    members: Members | None
    """Counts senders by name; None where they need none."""
    max_senders: int
    listener: PeerListener | None
    name: str
    key: ChannelKey | None
    heartbeat_timeout_s: float | None
    tokenizer: TokenizerIdentity | None
    checksum: bool


class RemoteReceiver(AsyncReceiver[R]):
    """The receiving end of a channel from other processes; see `ReceiveChannel`."""

    def __init__(
        self,
        record_type: type[R],
        *,
        transport: str,
        url: str,
        socket: zmq.Socket[bytes],
        terms: ReceiverConfig,
        most_waiting: int | None = None,
    ) -> None:
        self.url = url
        """Where senders connect."""
        self.checksum = terms.checksum
        """Whether senders are asked for checksums."""
        self.schema = record_type.schema
        """What is carried."""
        self._assemble = record_type.assemble
        self._transport = transport
        self._socket = socket
        self._terms = terms
        self._members = terms.members
        self._kept_open = False
        self._least = 1
        """Where members are not counted: how many senders must have come before the stream may end."""
        self._failure: MemberAbsent | None = None
        """A member did not come, or not come back: nothing more is received."""
        self._absence: asyncio.TimerHandle | None = None
        """Runs out when a member that is absent is given up."""
        self._ended_for_all = False
        """Whether it was said that the stream has ended."""
        self._most_waiting = most_waiting
        """Messages of one sender that ZeroMQ lets wait; None where it does not bound them."""
        self.peers: dict[bytes, Peer] = {}
        """Senders that are in, by the identity of their ZeroMQ socket."""
        self.refusals = RejectionCounter(url)
        self.admission = Admission(
            self.peers,
            self._admit,
            self._check,
            transport=transport,
            kind=self.schema.kind,
            most=terms.max_senders,
            tokenizer=terms.tokenizer,
        )
        self._acceptor: Acceptor | None = None
        """Set as soon as senders may come."""
        self._listener = terms.listener
        self._arrivals: deque[Event] = deque()
        self._index = 0
        """How many records of the first bundle were taken already."""
        self._waiting_here = 0
        """Records that arrived and were not taken yet."""
        self._received = 0
        self._waiting = Waiters()
        self._clock = WaitClock()
        self._until_checkpoint = CHECKPOINT_EVERY
        self._credit_returner = CreditReturner(self._send)
        self._release_at = min(RELEASE_AT, -(-terms.capacity // 2))
        """Records whose credit goes back unasked: every message wakes the sender once."""
        self._listening_soon = False
        """Whether the loop will listen without being told to by the descriptor."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._resources = AsyncExitStack()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<RemoteReceiver {self.url}: {state}, {len(self.peers)} senders, {self._received} received>"

    @property
    def rejected(self) -> int:
        """Connections and messages that were refused: strangers, other versions, nonsense."""
        return self.refusals.count

    # -- letting senders in ------------------------------------------------------------------------------------------

    def accept(self, acceptor: Acceptor, resources: AsyncExitStack) -> None:
        """Let senders in from now on. Owns both until closed."""
        self._acceptor = acceptor
        self._resources = resources
        if self._members is not None:
            self._members.open(self._loop.time())
            self._await_absent()

    def _check(self, hello: Connect) -> None:
        """Decide whether a sender may join; see `Members.check`."""
        if self._members is not None:
            if self._ended_for_all and self._listener is None:
                raise PeerClosed("the stream has ended: every member has said that it is done")
            self._members.check(hello.name, hello.pid)

    def _admit(self, hello: Connect, control: PeerControl, reader: PayloadReader) -> Peer:
        peer = self.peers[hello.identity] = Peer(hello, self._credit_returner.schedule, self._release_at)
        peer.control, peer.reader = control, reader
        if self._members is not None:
            self._members.join(hello.name, hello.pid, self._loop.time())
            self._await_absent()
        if self._acceptor is not None:
            self._acceptor.admitted()
        return peer

    def welcome(self, endpoint: str, slot_bytes: int) -> Accept:
        """What a sender is granted."""
        return Accept(
            PROTOCOL_VERSION,
            endpoint,
            self._terms.name,
            self._terms.capacity,
            self._terms.capacity_bytes,
            slot_bytes,
            self.checksum,
            self._members is not None,
        )

    def keep_open(self) -> None:
        """Let the stream not end by itself until `let_end`, however many senders come and go."""
        self._kept_open = True

    def let_end(self) -> None:
        """Let the stream end as soon as no sender is connected, whether or not any has come."""
        self._kept_open, self._least = False, 0
        self._wake()

    # -- hearing them ------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._listening_soon = False
        if not self._closed:
            self._drain()
        self._wake()

    def _wake(self) -> None:
        if self._arrivals or self._failure is not None or self._ended():
            self._waiting.wake_all()

    def drain(self) -> None:
        """Hear all that has come, however fast more comes."""
        self._drain(None if self._most_waiting is None else self._most_waiting * (1 + len(self.peers)))
        self._wake()

    def _drain(self, most: int | None = DRAIN_AT_ONCE) -> None:
        """Hear what has come; where more than `most` messages wait, the rest when other tasks have run."""
        heard = 0
        while not self._socket.closed:
            if heard == most:
                self._loop.call_soon(self._on_readable)  # the descriptor will not tell of them again
                return
            if not int(self._socket.getsockopt(EVENTS)) & POLLIN:
                return
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=self._transport != "tcp")
            heard += 1
            self._handle(identity if isinstance(identity, bytes) else identity.bytes, frames)

    def _handle(self, identity: bytes, frames: Frames) -> None:
        peer = self.peers.get(identity)
        if peer is None and self._acceptor is not None:
            self._acceptor.handle_unknown(identity, frames)
            return
        if peer is not None and peer.awaits_saved:
            self._heed_staying(peer, frames)
            return
        if peer is None or not peer.open:
            self.refusals.note("a message from a stranger")
            return
        peer.heard += 1
        try:
            match decode_of_sender(frames[0] if isinstance(frames[0], bytes) else frames[0].buffer):
                case Publish(descriptors):
                    self._arrive(peer, descriptors, frames[1:])
                case CreditRequest():
                    self._want(peer)
                case Telemetry(payload):
                    if self._listener is not None:
                        self._listener.observed(peer, payload)
                case Close(sequence, how):
                    self._part(peer, sequence, how)
        except (ProtocolMismatch, StaleDescriptor) as error:
            self.expel(peer, error)

    def _heed_staying(self, peer: Peer, frames: Frames) -> None:
        """One that has said goodbye may only say once more that it is done: it has heard that all is saved."""
        with suppress(ProtocolMismatch):
            message = decode_of_sender(frames[0] if isinstance(frames[0], bytes) else frames[0].buffer)
            if isinstance(message, Close) and message.how == "done":
                peer.awaits_saved = False
                self._send(peer, CloseAck())
                return
        self.refusals.note("a message after goodbye")

    def _arrive(self, peer: Peer, descriptors: tuple[Descriptor, ...], frames: Frames) -> None:
        peer.connected = True
        for descriptor in descriptors:
            if frames and sum(map(len, frames)) > descriptor.nbytes:
                raise StaleDescriptor(f"expected at most {descriptor.nbytes} bytes of columns, got more: {descriptor}")
            if descriptor.records < 1 or descriptor.sequence != peer.sequence + descriptor.records:
                raise StaleDescriptor(f"expected record {peer.sequence + 1} of {peer.name}, got {descriptor}")
            self._take_in(peer, (descriptor, frames))
        self._hold_to_bytes(peer)
        in_flight, capacity = peer.sequence - peer.returned, self._terms.capacity
        if in_flight > capacity:
            raise ProtocolMismatch(f"expected at most {capacity} records in flight, got {in_flight}")
        if in_flight == capacity:
            self._want(peer)

    def _hold_to_bytes(self, peer: Peer) -> None:
        most = self._terms.capacity_bytes + DEFAULT_SLOT_BYTES
        if peer.nbytes - peer.released_bytes > most:
            peer.collect_releases()
        if (nbytes := peer.nbytes - peer.released_bytes) > most:
            raise ProtocolMismatch(f"expected at most {most} bytes in flight, got {nbytes}")

    def _want(self, peer: Peer) -> None:
        """`peer` can use what it is owed: it said so, or has used all that it had."""
        peer.credit_requested = True
        if peer.unreturned_credit or peer.releases:
            self._credit_returner.schedule(peer)

    def _take_in(self, peer: Peer, bundle: Bundle) -> None:
        descriptor = bundle[0]
        peer.sequence = descriptor.sequence
        peer.nbytes += descriptor.bytes_of(descriptor.records)
        self._waiting_here += descriptor.records
        self._arrivals.append((peer, bundle))

    def _part(self, peer: Peer, sequence: int, how: Leaving) -> None:
        if sequence != peer.sequence:
            raise ProtocolMismatch(f"expected a goodbye after record {peer.sequence}, got one after {sequence}")
        peer.open, peer.awaits_saved = False, how == "staying"
        if how == "failed":
            self._miss(peer, f"{peer.name} (pid {peer.pid}) left with an error after record {peer.sequence}")
        elif self._members is not None:
            self._members.done(peer.member)
        if self._listener is not None:
            self._arrivals.append((peer, "closed"))
        self._credit_returner.give(peer)
        self._send(peer, CloseAck())

    def expel(self, peer: Peer, error: Exception) -> None:
        """A peer that breaks the protocol is treated as dead, once; the others go on."""
        if peer.disconnected_for_error:
            return
        peer.disconnected_for_error = True
        self.refusals.note(f"{peer.name} (pid {peer.pid}): {error}")
        peer.open = False
        kind, did = PeerLost, "broke the protocol"
        if isinstance(error, ChecksumDiffers):
            kind, did = RecordCorrupted, f"sent records to {self._terms.name} that were changed on their way"
        lost = kind(f"{peer.name} (pid {peer.pid}) {did} and was cut off: {printable(str(error))}")
        lost.__cause__ = error
        peer.given_up = Reject("PeerLost", str(lost))
        self._lose(peer, lost)
        self.send(peer.identity, peer.given_up)
        peer.control.shutdown_read()

    def reaches(self, peer: Peer) -> bool:
        """Whether there is a connection to `peer`: ZeroMQ tells only who tries to send, so this gives back nothing."""
        try:
            self._socket.send_multipart([peer.identity, encode(CreditGrant(()))], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True

    def gone(self, peer: Peer) -> Reject | None:
        """Its connection has ended. If it had not said goodbye it died: take in what it left, then tell.

        Returns:
            What it is to be told itself, should it still listen: it was given up.
        """
        self.drain()
        if peer.open:
            peer.open = False
            for bundle in peer.reader.recover(peer.sequence):
                self._take_in(peer, bundle)
            how = (
                UNRESPONSIVE.format(peer.unresponsive_s)
                if peer.unresponsive_s
                else "closed its connection without saying goodbye"
            )
            error = PeerLost(f"{peer.name} (pid {peer.pid}) {how} after record {peer.sequence}")
            self._lose(peer, error)
            log.warning("peer_lost", peer=peer.name, pid=peer.pid, records=peer.sequence)
            peer.given_up = Reject("PeerLost", str(error)) if peer.unresponsive_s else None
        elif self._listener is not None and not peer.disconnected_for_error:
            self._arrivals.append((peer, "disconnected"))
        self.peers.pop(peer.identity, None)
        self._waiting.wake_all()
        return peer.given_up

    def _lose(self, peer: Peer, error: PeerLost) -> None:
        self._arrivals.append((peer, error))
        self._miss(peer, str(error))

    def _miss(self, peer: Peer, how: str) -> None:
        """A member has gone, and has not said that it is done."""
        if self._members is not None:
            self._members.lose(peer.member, how, self._loop.time())
            self._await_absent()

    def _await_absent(self) -> None:
        """Have members that are absent given up when their time is over."""
        if self._absence is not None:
            self._absence.cancel()
        self._absence = None
        if self._members is not None and not math.isinf(self._members.due_s):
            self._absence = self._loop.call_at(self._members.due_s, self._give_up_absent, self._members)

    def _give_up_absent(self, members: Members) -> None:
        for error in members.expire(self._loop.time()):
            log.warning("member_absent", reason=str(error))
            if members.on_absence == "fail" and not self._ended_for_all:
                self._failure = self._failure or error
        self._await_absent()
        self._wake()

    # -- answering them ----------------------------------------------------------------------------------------------

    def _send(self, peer: Peer, message: Message) -> None:
        self.send(peer.identity, message)

    def send(self, identity: bytes, message: Message) -> None:
        """Send, and listen soon: the descriptor does not tell of what has come meanwhile."""
        if self._socket.closed:
            return
        with suppress(zmq.ZMQError):  # a peer that is gone needs no answer
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        if not self._listening_soon:
            self._listening_soon = True
            self._loop.call_soon(self._on_readable)

    # -- the receiving end -------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        if self._kept_open:
            return False
        if self._members is not None:
            return self._members.all_done
        alive = any(peer.open for peer in self.peers.values())
        return not alive and not self.admission.granted and self.admission.joined >= self._least

    def receive_nowait(self) -> R:
        """The next record if there is one now; see `ReceiveChannel.receive_nowait`."""
        if (record := self._receive()) is None:
            raise anyio.WouldBlock
        return record

    def _receive(self) -> R | None:
        """The next record; None while there is none."""
        while (found := self._next()) is not None:
            if (record := self._take(*found)) is not None:
                return record
        return None

    def _next(self) -> tuple[Peer, Bundle] | None:
        """The bundle that the next record is in, None while there is none; the notices before it are told."""
        if self._closed:
            raise anyio.ClosedResourceError
        while True:
            if not self._arrivals:
                self._drain()
            if not self._arrivals:
                if self._failure is not None:
                    raise self._failure
                if self._ended():
                    self._ended_for_all = True
                    raise anyio.EndOfStream
                return None
            peer, arrival = self._arrivals[0]
            if isinstance(arrival, tuple):
                return peer, arrival
            self._arrivals.popleft()
            self._tell(peer, arrival)

    def _tell(self, peer: Peer, notice: Notice) -> None:
        """A sender died, said goodbye, or is gone after it did."""
        if isinstance(notice, PeerLost):
            if self._listener is not None:
                self._listener.lost(peer, notice)
            elif self._members is None:
                raise notice
        elif self._listener is not None:
            tell = self._listener.closed if notice == "closed" else self._listener.disconnected
            tell(peer)

    def _take(self, peer: Peer, bundle: Bundle) -> R | None:
        try:
            record: R = self._assemble(*peer.reader.fetch(bundle, self._index, peer.release))
        except (StaleDescriptor, InvalidRecord) as error:
            self._drop(peer, bundle, error)
            return None
        self._count(peer, bundle, 1)
        return record if self._listener is None else self._listener.received(peer, record)

    def _count(self, peer: Peer, bundle: Bundle, records: int) -> None:
        """More records of `peer` were handed over; credit goes back where enough has gathered."""
        self._received += records
        self._pass_over(peer, bundle, records)
        if peer.releases:
            peer.collect_releases()
            if peer.credit_due:
                self._credit_returner.give(peer)

    def _drop(self, peer: Peer, bundle: Bundle, error: Exception) -> None:
        """What is left of a bundle cannot be read."""
        self._pass_over(peer, bundle, bundle[0].records - self._index)
        self.expel(peer, error)

    def _pass_over(self, peer: Peer, bundle: Bundle, records: int) -> None:
        """The next records of the first bundle wait no more."""
        peer.taken += records
        self._waiting_here -= records
        self._index += records
        if self._index == bundle[0].records:
            self._arrivals.popleft()
            self._index = 0

    async def receive(self) -> R:
        """The next record, waiting for one if need be; see `ReceiveChannel.receive`."""
        self._until_checkpoint -= 1
        if self._until_checkpoint <= 0:
            await self._breathe()
        while (record := self._receive()) is None:
            await self._wait()
        return record

    async def receive_packed(self, packer: Packer) -> TrainBatch:
        """Copy groups from where they lie straight into `packer` until the next has no room there, and pack them.

        No view of a group is made, so this is the fastest way from a channel into a batch. A batch also ends where the
        next group has other columns, and at the end of the stream. What was copied before a wait that is cancelled
        stays in `packer`.

        Raises:
            TypeError: this channel does not carry groups, or belongs to a pipeline, which has to see every record.
            InvalidRecord: the next group has no room in an empty batch; `receive` still gives it.
            anyio.EndOfStream: all senders are gone, and all that they sent was received.
            PeerLost: a sender died; what it had sent was received before.
        """
        if self.schema.kind != "group" or self._listener is not None:
            whose = " of a pipeline" if self._listener is not None else ""
            raise TypeError(f"expected a channel of groups of its own, got one of kind {self.schema.kind}{whose}")
        try:
            while True:
                if (found := self._next()) is None:
                    await self._wait()
                elif self._pack_from(*found, packer):
                    return packer.pack()
                else:
                    self._until_checkpoint -= 1
                    if self._until_checkpoint <= 0:
                        await self._breathe()
        except anyio.EndOfStream:
            if not packer.groups:
                raise
            return packer.pack()

    def _pack_from(self, peer: Peer, bundle: Bundle, packer: Packer) -> bool:
        """Copy the next groups of a bundle into `packer`, as many as it has room for; whether it was full before."""
        try:
            taken = peer.reader.pack(bundle, self._index, packer)
        except (StaleDescriptor, InvalidRecord) as error:
            self._drop(peer, bundle, error)
            return False
        if taken:
            peer.release(bundle[0], taken)
            self._count(peer, bundle, taken)
        elif not packer.groups:
            raise InvalidRecord(
                f"expected a group of at most {packer.max_tokens} tokens, as many as a batch holds, got one that "
                f"takes {bundle[0].nbytes} bytes: make batches larger or groups smaller"
            )
        return not taken

    async def _wait(self) -> None:
        with self._clock.waiting("record"):
            self._credit_returner.flush_all()
            if not self._arrivals and self._failure is None and not self._ended():
                await self._waiting.wait()

    async def _breathe(self) -> None:
        """Let other tasks run, and let a cancellation in before anything was moved."""
        self._until_checkpoint = CHECKPOINT_EVERY
        await anyio.lowlevel.checkpoint()

    def statistics(self) -> ChannelStatistics:
        """What this end holds and waits for."""
        peers = [peer for peer in self.peers.values() if peer.open]
        for peer in peers:
            peer.collect_releases()
        return ChannelStatistics(
            transport=self._transport,
            capacity=self._terms.capacity * max(1, len(peers)),
            items=sum(peer.sequence - peer.returned - peer.unreturned_records for peer in peers),
            capacity_bytes=self._terms.capacity_bytes * max(1, len(peers)),
            nbytes=sum(peer.nbytes - peer.released_bytes for peer in peers),
            sent=self._received + self._waiting_here,
            received=self._received,
            senders=len(peers),
            waiting_for=self._clock.waiting_for,
            waited_s=self._clock.waited_s,
        )

    async def aclose(self) -> None:
        """Close this end; senders get PeerClosed. AsyncCloseable twice is fine."""
        if self._closed:
            return
        for peer in self.peers.values():
            self._credit_returner.give(peer)
        self._on_readable()
        self._closed = True
        self._credit_returner.close()
        self._loop.remove_reader(self._fd)
        if self._absence is not None:
            self._absence.cancel()
        self._waiting.wake_all()
        with anyio.CancelScope(shield=True):
            try:
                for peer in list(self.peers.values()):
                    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        if (
                            not peer.open and not peer.disconnected_for_error
                        ):  # the CloseAck that was said before may come too late
                            await peer.control.send(CloseAck())
                        await peer.control.send(Closed())
            finally:  # a shield keeps out anyio's cancellations, not asyncio's own, which Ctrl-C is
                try:
                    await self._close_resources()
                finally:
                    self._socket.close()
                    # With the peers, their segments are unmapped now, not when cycles are collected.
                    self._arrivals.clear()
                    self.peers.clear()

    async def _close_resources(self) -> None:
        try:
            if self._acceptor is not None:
                await self._acceptor.aclose()
        finally:
            await self._resources.aclose()
