"""Assign the prompts of a source to its workers, each to one that asks for it.

A prompt is admitted when it is about to be sampled. One that a worker held when it died, or left, is assigned again,
before any other; where two workers have died with it, it may be the cause, and is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakSet

import anyio

from ..._schemas import GroupId
from ..._schemas.bounds import MOST_ENTRIES, batched
from ..._schemas.control import Instruction
from ..accounting.ledger import Ledger
from ..accounting.repetition_sets import iter_bits
from ..channels.peer import Peer
from ..errors import ProtocolMismatch
from ..graph.assignment import Assign, Assignment
from ..util.waiting import Waiters
from .worker_accounting import WorkerAccounting
from .worker_messages import Assigned, NoneLeft, WorkerInstruction, encode_instruction

PlaceOf = Callable[[Peer], int | None]
"""Returns the place of a worker that takes prompts; None for one that has ended, or is leaving."""


def instruct(peer: Peer, instruction: WorkerInstruction) -> None:
    """Send a worker an instruction."""
    peer.send(Instruction(encode_instruction(instruction)))


class PromptAssigner:
    """The prompts of one source while it runs; the `Samplers` of its `Assign`."""

    def __init__(
        self,
        assign: Assign,
        ledger: Ledger,
        accounting: WorkerAccounting,
        place_of: PlaceOf,
        *,
        at_a_time: int,
        at_first: int,
    ) -> None:
        """Prepare to assign.

        Args:
            assign: yields the prompts.
            ledger: of the run.
            accounting: of the workers.
            place_of: knows the workers that are here.
            at_a_time: the most prompts that a worker may ask for at a time.
            at_first: the workers that share the first window, if it is one of several prompts.
        """
        self._assign = assign
        self._ledger = ledger
        self._accounting = accounting
        self._place_of = place_of
        self._at_a_time = at_a_time
        self._at_first = at_first
        self._asking: deque[Peer] = deque()
        """Workers that ask for prompts, once for each time."""
        self._known = WeakSet[Peer]()
        """Workers that have ever asked: their stage has begun."""
        self._begun = False
        """True once a worker has asked."""
        self._shares = False
        """True once a window of several prompts has come: then workers wait for each other between two of them."""
        self._drawn: list[Assignment] = []
        """The window that is assigned next."""
        self._returned: list[Assignment] = []
        """The prompts of workers that have died; they are assigned before it."""
        self._died_with: set[GroupId] = set()
        """The prompts that a worker has died with."""
        self._exhausted = False
        """True once all prompts were drawn."""
        self.over: bool = False
        """True once all prompts have arrived, or ended."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when that is so."""
        self._changed = Waiters()
        self._awaiting_none = False
        """True while `hold_none` waits."""
        accounting.on_taken = self._on_taken
        accounting.on_returned = self._take_back

    # -- workers -------------------------------------------------------------------------------------------------------

    def ask(self, peer: Peer) -> None:
        """Note that a worker has room for a prompt, or, in a synchronous schedule, for its share of a window.

        Raises:
            ProtocolMismatch: it asks for more at a time than it could sample.
        """
        if self._asking.count(peer) >= self._at_a_time:
            raise ProtocolMismatch(f"expected at most {self._at_a_time} requests for prompts at a time, got more")
        self._begun = True
        self._known.add(peer)
        self._asking.append(peer)
        self._changed.wake_all()

    def workers_changed(self) -> None:
        """Note that a worker has ended, or is leaving."""
        self._changed.wake_all()

    def _take_back(self, group: GroupId, mask: int) -> bool:
        """Assign these repetitions again, unless another worker has died with the prompt before."""
        if group in self._died_with:
            return False
        self._died_with.add(group)
        self._returned.append(Assignment(group, mask))
        self._changed.wake_all()
        return True

    def _on_taken(self) -> None:
        """Look again, if the groups that workers hold matter now: this is called for each record."""
        if self._exhausted or self._awaiting_none or self._asking:
            self._changed.wake_all()

    # -- `Samplers` ----------------------------------------------------------------------------------------------------

    @property
    def groups_held(self) -> int:
        """Return the number of groups that are assigned, or are to be assigned again, and that have not arrived."""
        return self._accounting.groups_held + len(self._returned)

    async def hold_none(self) -> None:
        """Wait until every group that was assigned has arrived."""
        self._awaiting_none = True
        while self.groups_held:
            await self._changed.wait()
        self._awaiting_none = False

    # -- assignment ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Assign all prompts, and then dismiss every worker that asks; until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._draw)
                while True:
                    self._give()
                    if self._exhausted and not self._drawn and not self.groups_held:
                        self.over = True
                        self.on_over()
                        self._dismiss_asking()
                    await self._changed.wait()
        finally:
            self._asking.clear()  # with them, the memory of their connections is released

    async def _draw(self) -> None:
        """Draw a window whenever a worker asks and all before are assigned; also without workers, to notice the end."""
        prompts = self._assign(self)
        while True:
            while self._drawn or not (self._askers() or self._deserted):
                await self._changed.wait()
            if (window := await anext(prompts, None)) is None:
                break
            self._drawn = list(window)
            self._shares = self._shares or len(window) > 1
            self._changed.wake_all()
        self._exhausted = True
        self._changed.wake_all()

    @property
    def _deserted(self) -> bool:
        """Return whether there were workers, and all have left."""
        return self._begun and all(self._place_of(peer) is None for peer in self._known)

    def _askers(self) -> list[Peer]:
        """Return the workers that ask and may hold another group; forget those that have ended, or are leaving."""
        self._asking = deque(peer for peer in self._asking if self._place_of(peer) is not None)
        return [peer for peer in self._asking if self._accounting.has_room(peer.name)]

    def _give(self) -> None:
        """Assign all prompts that can be assigned now."""
        while waiting := self._returned or self._drawn:
            window = list(waiting) if self._shares else waiting[:1]
            if not (takers := self._takers(len(window))):
                return
            del waiting[: len(window)]
            for first, peer in enumerate(takers):
                self._asking.remove(peer)
                self._tell(peer, window[first :: len(takers)])
            self._changed.wake_all()  # the next window may be drawn: workers may ask for several prompts ahead

    def _takers(self, prompts: int) -> list[Peer]:
        """Return the workers that share a window of so many prompts; empty while some are awaited."""
        # There are three cases:
        #
        # 1. One prompt: the worker that holds the fewest groups, of several the one that has asked longest.
        # 2. The first window of a synchronous schedule: as many workers as were started, so that one that starts faster
        #    does not get all of it.
        # 3. A later one: all workers whose stage has begun. Each asks again when it has sent its share, so that the
        #    shares, and with them the batches of a policy, do not depend on a clock.
        askers = self._askers()
        if prompts == 1 or not askers:
            return [min(askers, key=lambda peer: self._accounting.held_by(peer.name))] if askers else []
        here = {place: peer for peer in self._known if (place := self._place_of(peer)) is not None}
        if len(here) < self._at_first or not set(here.values()) <= set(askers):
            return []
        self._at_first = 0
        return [here[place] for place in sorted(here)][:prompts]

    def _tell(self, peer: Peer, prompts: Sequence[Assignment]) -> None:
        for group, mask in prompts:
            self._accounting.assigned(peer.name, group, mask)
        for part in batched(prompts, MOST_ENTRIES):
            entries = tuple((group, tuple(iter_bits(mask))) for group, mask in part)
            instruct(peer, Assigned(entries, self._ledger.step, self._ledger.published))

    def _dismiss_asking(self) -> None:
        while self._asking:
            instruct(self._asking.popleft(), NoneLeft())
