"""The members of a channel: senders that are counted by name, so that a restarted one is recognised.

The stream ends when as many members as were announced are done. A member that is lost, or has not connected yet, is
awaited for a time. Decides only; knows names and a clock, neither sockets nor connections.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from ..errors import MemberAbsent, MemberNameInUse, MemberNameRequired, TooManyMembers

DEFAULT_ABSENCE_TIMEOUT_S = 600.0
"""Bound on the absence of a member: finding a machine and loading an environment takes less."""

OnAbsence: TypeAlias = Literal["fail", "continue"]
"""The consequence of an absence that lasts too long: an error that names the member, or the stream goes on without
it."""


class Members:
    """The members of a channel: the first `count` names that join. Each is sending, done, or lost.

    >>> members = Members(1, absence_timeout_s=60, on_absence="fail")
    >>> members.open(now_s=0)
    >>> members.join("env 0", pid=7, now_s=5)
    >>> members.done("env 0")
    >>> members.all_done
    True
    """

    def __init__(self, count: int, *, absence_timeout_s: float, on_absence: OnAbsence) -> None:
        self._count = count
        self._absence_timeout_s = absence_timeout_s
        self.on_absence = on_absence
        self._sending: dict[str, int] = {}
        """Process id of each connected member."""
        self._done: set[str] = set()
        """Members that are done, or no longer awaited, and have not joined again."""
        self._lost: dict[str, tuple[float, str]] = {}
        """The deadline of each lost member and the way it was lost, in the order of their loss."""
        self._seen: set[str] = set()
        """Members that have ever joined."""
        self._missing_due_s = math.inf
        """The deadline of those that have never joined."""
        self._without_missing = False
        """True if the stream goes on without those that have never joined."""

    def __repr__(self) -> str:
        return (
            f"<Members: {len(self._sending)} sending, {len(self._done)} done, {len(self._lost)} lost, of {self._count}>"
        )

    @property
    def all_done(self) -> bool:
        """Return whether every member is done."""
        return len(self._done) >= (len(self._seen) if self._without_missing else self._count)

    @property
    def due_s(self) -> float:
        """Return the time at which `expire` is due; infinity while no member is absent."""
        lost_due_s = next(iter(self._lost.values()))[0] if self._lost else math.inf
        return min(lost_due_s, self._missing_due_s)

    def open(self, now_s: float) -> None:
        """Note that members can connect from now on."""
        self._missing_due_s = now_s + self._absence_timeout_s

    def check(self, name: str, pid: int) -> None:
        """Check that a sender may join.

        Raises:
            MemberNameRequired: it has no name.
            MemberNameInUse: a member of that name is connected.
            TooManyMembers: as many others as were announced have joined.
        """
        if not name:
            raise MemberNameRequired(
                f"expected a sender with a name, for {self._count} members are counted by name, got one without (pid "
                f"{pid}): give connect or connect_with_replay name=…, the same after every restart"
            )
        if name in self._sending:
            raise MemberNameInUse(
                f"expected one connection of member {name!r} at a time, got a second one (pid {pid}) beside that of "
                f"pid {self._sending[name]}: give every sender a name of its own; a restarted sender may join once "
                f"its former connection has ended"
            )
        if name not in self._seen and len(self._seen) >= self._count:
            raise TooManyMembers(
                f"expected {self._count} members, which are {self._names}, got another one, "
                f"{name!r} (pid {pid}): give senders the same name after every restart, or raise senders"
            )

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, sorted(self._seen)))

    def join(self, name: str, pid: int, now_s: float) -> None:
        """Note that a member has connected. If it was done, it no longer is.

        A member that joins for the first time restarts the time of those that are missing: they are being started.

        Raises:
            MemberNameRequired, MemberNameInUse, TooManyMembers: as `check`.
        """
        self.check(name, pid)
        self._done.discard(name)
        self._lost.pop(name, None)
        self._sending[name] = pid
        if name not in self._seen:
            self._seen.add(name)
            missing = len(self._seen) < self._count and not self._without_missing
            self._missing_due_s = now_s + self._absence_timeout_s if missing else math.inf

    def done(self, name: str) -> None:
        """Note that a member is done."""
        del self._sending[name]
        self._done.add(name)

    def lose(self, name: str, how: str, now_s: float) -> None:
        """Note that the connection of a member ended before it was done."""
        del self._sending[name]
        self._lost[name] = (now_s + self._absence_timeout_s, how)

    def expire(self, now_s: float) -> list[MemberAbsent]:
        """Stop awaiting the members whose time is over; return an error for each lost one, and one for the missing.

        They stay absent, so that the stream never ends, unless it is to go on without them.
        """
        overdue = {name: how for name, (due_s, how) in self._lost.items() if due_s <= now_s}
        for name in overdue:
            del self._lost[name]
            if self.on_absence == "continue":
                self._done.add(name)
        errors = [self._absent(name, how) for name, how in overdue.items()]
        if self._missing_due_s <= now_s:
            self._missing_due_s = math.inf
            self._without_missing = self.on_absence == "continue"
            errors.append(self._missing())
        return errors

    def _missing(self) -> MemberAbsent:
        return MemberAbsent(
            f"expected {self._count} members, each within {self._absence_timeout_s:g} s of the one before, got "
            f"{len(self._seen)} ({self._names or 'none'}): {self._count - len(self._seen)} never came. Start them, "
            f"each under a name of its own, lower senders, raise absence_timeout_s, or go on without them with "
            f"on_absence='continue'"
        )

    def _absent(self, name: str, how: str) -> MemberAbsent:
        return MemberAbsent(
            f"expected member {name!r} to come back within {self._absence_timeout_s:g} s, got nothing: {how}. Start it "
            f"again under its name, raise absence_timeout_s, or go on without it with on_absence='continue'"
        )
