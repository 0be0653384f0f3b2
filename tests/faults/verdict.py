"""What the log of a cell must say. The promises that hold in every cell first, then what each role owes.

Everywhere: the blow fell once; what was committed was committed once, and not a bit of it differs from what was sent;
whoever ended by himself left nothing open; the books balance; the survivors knew within a second, and whom they lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.cells import AT, COUNT, SILENCE_S, Cell

__all__ = ["Story", "judge"]

KNOWN_WITHIN_S = 20.0
"""Bound on hearing of a death: far more than the milliseconds that it takes, for the machine may be busy, and well
below the 30 s after which a peer that nothing was heard of counts as lost. So the death itself was noticed."""

TRAJECTORIES = 2
"""In each group."""


@dataclass(frozen=True)
class Story:
    """What happened in a cell."""

    lines: list[list[Any]]
    """The log."""
    pids: list[int]
    """The actors that were started by the observer, the victim first."""
    statuses: dict[int, int]
    """How those ended, and whoever was orphaned; as `waitpid` tells it."""
    gone_at: float
    """When the last process was gone."""

    def all(self, word: str) -> list[list[Any]]:
        """What belongs to each line that begins with `word`."""
        return [more for first, *more in self.lines if first == word]

    @property
    def struck(self) -> tuple[int, float]:
        """Who, and when."""
        ((pid, at),) = self.all("struck")
        return pid, at

    @property
    def committed(self) -> list[int]:
        """The numbers of the records, in order."""
        return [number for number, _ in self.all("committed")]

    @property
    def told(self) -> str:
        """What the survivors were told, which was once, and in time; empty where they were told nothing."""
        told = self.all("told")
        if not told:
            return ""
        ((at, text),) = told
        self.expect_soon(at)
        return str(text)

    def expect_soon(self, at: float) -> None:
        """What happened then came soon enough after the blow."""
        took = at - self.struck[1]
        if took >= KNOWN_WITHIN_S:
            raise AssertionError(f"expected within {KNOWN_WITHIN_S} s, took {took:.2f}")


def judge(cell: Cell, story: Story) -> None:
    """Hold the promises against what happened.

    Raises:
        AssertionError: one was broken.
    """
    try:
        _judge_delivery(story)
        _judge_leftovers(cell, story)
        ROLES[cell.role](cell, story)
    except (AssertionError, ValueError) as error:
        log = "\n".join(map(str, story.lines))
        raise AssertionError(f"{error}\nthe log:\n{log}\nstatuses {story.statuses}") from error


def _judge_delivery(story: Story) -> None:
    sent = dict(story.all("sent"))
    assert len(set(story.committed)) == len(story.committed), "committed twice"
    for number, digest in story.all("committed") + story.all("held"):
        assert sent[number] == digest, f"record {number} differs from what was sent"


def _judge_leftovers(cell: Cell, story: Story) -> None:
    victim, *survivors = story.pids
    for left in story.all("left"):
        assert left == [[]]
    for pid in survivors:
        assert story.statuses[pid] == 0
    if cell.role == "middle":
        assert story.statuses == {victim: 0}  # the run reaped its workers, and said how it ended
    elif cell.role != "supervisor" or cell.fault != "exception":  # who runs a pipeline is told, and lives
        stopped = (cell.role, cell.fault) == ("supervisor", "SIGTERM")  # a run that is told to stop says so
        assert _ending(story.statuses[victim]) == (128 + signal.SIGTERM if stopped else VICTIMS_END[cell.fault])
    by_themselves = len(story.pids) - (cell.dies and cell.role != "middle")
    assert len(story.all("left")) == by_themselves


VICTIMS_END = {"SIGKILL": -9, "SIGTERM": -15, "_exit": 3, "exception": 1, "stall": 0, "zombie": 0}


def _ending(status: int) -> int:
    return os.waitstatus_to_exitcode(status)


# -- channels --------------------------------------------------------------------------------------------------------


def _judge_consumer_survives(cell: Cell, story: Story) -> None:
    ((balance,),) = story.all("balance")
    assert balance["admitted"] == balance["ended"]["trained"] == TRAJECTORIES * len(story.committed)
    count = len(story.committed)
    assert story.committed == list(range(count))
    published = AT + (cell.moment == "published")
    everything = AT if cell.moment == "shutdown" else COUNT
    assert count == (everything if cell.fault == "stall" else published)
    if cell.moment == "shutdown" and (cell.dies or cell.fault == "zombie"):  # what it said last may not have left it
        assert "after record 5" in story.told or not story.told
    elif cell.dies:
        assert f"the producer (pid {story.pids[0]})" in story.told
        assert f"without closing the channel after record {count}" in story.told
    elif cell.fault == "zombie" and cell.moment != "shutdown":
        assert f"the producer (pid {story.pids[0]}) did not respond for {SILENCE_S} s" in story.told
        assert f"after record {count}" in story.told
    else:
        assert not story.told
    if (cell.dies or cell.fault == "zombie") and cell.moment == "published":
        assert sum(found for (found,) in story.all("recovered")) > 0
    if cell.fault == "zombie" and cell.moment != "shutdown":
        ((woke_to,),) = story.all("woke to")
        assert woke_to.startswith("the consumer, the receiver, disconnected this sender: the producer (pid")


def _judge_producer_survives(cell: Cell, story: Story) -> None:
    accepted = [number for (number,) in story.all("accepted")]
    goes_on = cell.stops and cell.moment != "shutdown"
    assert story.committed == (accepted if goes_on else list(range(AT)))
    assert len(accepted) == COUNT if cell.fault == "stall" and goes_on else AT <= len(accepted) < COUNT
    assert not story.all("woke to") or cell.fault == "zombie"
    if goes_on:
        assert (f"the consumer, the receiver, did not respond for {SILENCE_S} s" in story.told) == (
            cell.fault == "zombie"
        )
    elif cell.moment == "shutdown" or cell.fault == "exception":
        assert story.told == "the consumer, the receiver, closed the channel"
    else:
        assert story.told == "the consumer, the receiver, died: its connection is closed"


# -- pipelines -------------------------------------------------------------------------------------------------------


def _judge_report(story: Story) -> dict[str, Any]:
    balance: dict[str, Any]
    ((balance, stop_reason, restarts),) = story.all("report")
    assert balance["in_flight"] == 0
    assert balance["admitted"] == sum(balance["ended"].values()) == TRAJECTORIES * len(story.all("sent"))
    return balance | {"stop_reason": stop_reason, "restarts": restarts}


MIDDLE_DIED = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGTERM": "was killed by SIGTERM",
    "_exit": "exited with status 3 before its stage had returned",
    "exception": "raised tests.faults.actors.Doomed: struck",
    "stall": "",
    "zombie": "",
}

FATES: dict[str, dict[str, set[str]]] = {
    "writing": {"SIGTERM": {"committed"}, "stall": {"committed"}},
    "published": {"exception": {"committed", "lost"}, "zombie": {"committed", "lost"}},
    "reading": {"stall": {"committed"}},
    "committing": {"SIGTERM": {"filtered"}, "exception": {"filtered", "lost"}, "stall": {"filtered"}},
    "idle": {"stall": {"committed"}, "exception": {"lost", "unsent"}},
    "shutdown": {},
}
"""What becomes of the record that is struck with the middle stage, where it is not as in `FATE`."""

FATE = {
    "writing": {"lost"},
    "published": {"committed"},
    "reading": {"lost"},
    "committing": {"lost"},
    "idle": {"committed", "lost"},  # it may be on its way to one that is no more
    "shutdown": {"committed"},
}


def _judge_middle(cell: Cell, story: Story) -> None:
    report = _judge_report(story)
    struck = f"Middle 1/1 (pid {story.struck[0]}) {MIDDLE_DIED[cell.fault]}"
    filtered, lost = report["ended"]["filtered"], report["ended"]["lost"]
    assert report["ended"]["trained"] == TRAJECTORIES * len(story.committed)
    assert filtered in {0, TRAJECTORIES}
    if AT in story.committed:
        fate = "committed"
    elif filtered:
        fate = "filtered"
    else:
        fate = "lost" if AT in [number for number, _ in story.all("sent")] else "unsent"
    assert fate in FATES[cell.moment].get(cell.fault, FATE[cell.moment])
    assert story.told == ("" if cell.stops else struck)
    if cell.fault in {"exception", "zombie"}:
        return
    assert report["stop_reason"] == "end of stream"
    assert report["restarts"] == (0 if cell.fault == "stall" else 1)
    assert len(story.all("sent")) == COUNT
    if cell.fault == "stall" or cell.moment == "shutdown":
        assert not lost
    assert set(report["reasons"]["lost"]) == ({struck} if lost else set())


def _judge_supervisor(cell: Cell, story: Story) -> None:
    assert story.committed == list(range(len(story.committed)))
    committed = {"idle": AT, "reading": AT, "committing": AT, "shutdown": AT + 1}.get(cell.moment)
    if committed is not None and cell.fault == "SIGTERM":
        assert committed <= len(story.committed) < COUNT  # what the sink is in, it finishes
    elif committed is not None and (cell.fault != "stall" or cell.moment == "shutdown"):
        assert len(story.committed) == committed
    if cell.dies:
        story.expect_soon(story.gone_at)
        return
    report = _judge_report(story)
    in_the_act = (cell.fault, cell.moment) == ("exception", "committing")  # committed, and not in the log
    assert report["ended"]["trained"] == TRAJECTORIES * (len(story.committed) + in_the_act)
    assert report["restarts"] == 0
    if cell.fault == "SIGTERM":
        assert report["stop_reason"] == "stopped by SIGTERM"
    elif cell.fault == "exception":
        assert "raised tests.faults.actors.Doomed: struck" in story.told
    elif cell.moment != "shutdown":
        assert len(story.committed) == COUNT
        assert report["stop_reason"] == "end of stream"


ROLES: dict[str, Callable[[Cell, Story], None]] = {
    "producer": _judge_consumer_survives,
    "consumer": _judge_producer_survives,
    "middle": _judge_middle,
    "supervisor": _judge_supervisor,
}
