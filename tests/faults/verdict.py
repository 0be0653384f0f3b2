"""Check the log of a cell: first the rules for every cell, then those for each role.

In every cell: the fault was injected once; each record was committed at most once, and equals the sent one bit for bit;
a process that ended by itself left nothing open; the ledger balances; the survivors noticed the lost peer in time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.cells import AT, COUNT, HEARTBEAT_TIMEOUT_S, Cell

__all__ = ["History", "judge"]

NOTICED_WITHIN_S = 20.0
"""Bound on noticing a death: far more than the milliseconds that it takes, for the machine may be busy, and well below
the heartbeat timeout of 30 s. So the death itself was noticed."""

TRAJECTORIES = 2
"""In each group."""


@dataclass(frozen=True)
class History:
    """The events of a cell."""

    lines: list[list[Any]]
    """The log."""
    pids: list[int]
    """The actors that were started by the observer, the victim first."""
    statuses: dict[int, int]
    """The statuses of those and of orphans, as `waitpid` returns them."""
    ended_at: float
    """The time at which the last process had ended."""

    def all(self, word: str) -> list[list[Any]]:
        """Return the values of each line that begins with `word`."""
        return [more for first, *more in self.lines if first == word]

    @property
    def injected(self) -> tuple[int, float]:
        """Return the process id of the victim, and the time."""
        ((pid, at),) = self.all("injected")
        return pid, at

    @property
    def committed(self) -> list[int]:
        """Return the numbers of the committed records, in order."""
        return [number for number, _ in self.all("committed")]

    @property
    def noticed(self) -> str:
        """Return the one text that the survivors logged, in time; empty if they logged none."""
        noticed = self.all("noticed")
        if not noticed:
            return ""
        ((at, text),) = noticed
        self.expect_soon(at)
        return str(text)

    def expect_soon(self, at: float) -> None:
        """Assert that `at` is soon enough after the injection."""
        took = at - self.injected[1]
        if took >= NOTICED_WITHIN_S:
            raise AssertionError(f"expected within {NOTICED_WITHIN_S} s, took {took:.2f}")


def judge(cell: Cell, history: History) -> None:
    """Check the rules against the events.

    Raises:
        AssertionError: a rule is broken.
    """
    try:
        _judge_delivery(history)
        _judge_leftovers(cell, history)
        ROLES[cell.role](cell, history)
    except (AssertionError, ValueError) as error:
        log = "\n".join(map(str, history.lines))
        raise AssertionError(f"{error}\nthe log:\n{log}\nstatuses {history.statuses}") from error


def _judge_delivery(history: History) -> None:
    sent = dict(history.all("sent"))
    assert len(set(history.committed)) == len(history.committed), "committed twice"
    for number, digest in history.all("committed") + history.all("held"):
        assert sent[number] == digest, f"record {number} differs from what was sent"


def _judge_leftovers(cell: Cell, history: History) -> None:
    victim, *survivors = history.pids
    for left in history.all("left"):
        assert left == [[]]
    for pid in survivors:
        assert history.statuses[pid] == 0
    if cell.role == "middle":
        assert history.statuses == {victim: 0}  # the run reaped its workers, and reported its end
    elif cell.role != "supervisor" or cell.fault != "exception":  # the process that runs a pipeline continues
        stopped = (cell.role, cell.fault) == (
            "supervisor",
            "SIGTERM",
        )  # a run that is stopped exits with the number of the signal
        assert _ending(history.statuses[victim]) == (128 + signal.SIGTERM if stopped else VICTIMS_END[cell.fault])
    by_themselves = len(history.pids) - (cell.dies and cell.role != "middle")
    assert len(history.all("left")) == by_themselves


VICTIMS_END = {"SIGKILL": -9, "SIGTERM": -15, "_exit": 3, "exception": 1, "stall": 0, "zombie": 0}


def _ending(status: int) -> int:
    return os.waitstatus_to_exitcode(status)


# -- channels --------------------------------------------------------------------------------------------------------


def _judge_consumer_survives(cell: Cell, history: History) -> None:
    ((balance,),) = history.all("balance")
    assert balance["admitted"] == balance["ended"]["trained"] == TRAJECTORIES * len(history.committed)
    count = len(history.committed)
    assert history.committed == list(range(count))
    published = AT + (cell.moment == "published")
    everything = AT if cell.moment == "shutdown" else COUNT
    assert count == (everything if cell.fault == "stall" else published)
    if cell.moment == "shutdown" and (cell.dies or cell.fault == "zombie"):  # its last message may not have been sent
        assert "after record 5" in history.noticed or not history.noticed
    elif cell.dies:
        assert f"the producer (pid {history.pids[0]})" in history.noticed
        assert f"without closing the channel after record {count}" in history.noticed
    elif cell.fault == "zombie" and cell.moment != "shutdown":
        assert f"the producer (pid {history.pids[0]}) did not respond for {HEARTBEAT_TIMEOUT_S} s" in history.noticed
        assert f"after record {count}" in history.noticed
    else:
        assert not history.noticed
    if (cell.dies or cell.fault == "zombie") and cell.moment == "published":
        assert sum(found for (found,) in history.all("recovered")) > 0
    if cell.fault == "zombie" and cell.moment != "shutdown":
        ((failure,),) = history.all("failed with")
        assert failure.startswith("the consumer, the receiver, disconnected this sender: the producer (pid")


def _judge_producer_survives(cell: Cell, history: History) -> None:
    accepted = [number for (number,) in history.all("accepted")]
    continues = cell.stops and cell.moment != "shutdown"
    assert history.committed == (accepted if continues else list(range(AT)))
    assert len(accepted) == COUNT if cell.fault == "stall" and continues else AT <= len(accepted) < COUNT
    assert not history.all("failed with") or cell.fault == "zombie"
    if continues:
        assert (f"the consumer, the receiver, did not respond for {HEARTBEAT_TIMEOUT_S} s" in history.noticed) == (
            cell.fault == "zombie"
        )
    elif cell.moment == "shutdown" or cell.fault == "exception":
        assert history.noticed == "the consumer, the receiver, closed the channel"
    else:
        assert history.noticed == "the consumer, the receiver, died: its connection is closed"


# -- pipelines -------------------------------------------------------------------------------------------------------


def _judge_report(history: History) -> dict[str, Any]:
    balance: dict[str, Any]
    ((balance, stop_reason, restarts),) = history.all("report")
    assert balance["in_flight"] == 0
    assert balance["admitted"] == sum(balance["ended"].values()) == TRAJECTORIES * len(history.all("sent"))
    return balance | {"stop_reason": stop_reason, "restarts": restarts}


MIDDLE_DIED = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGTERM": "was killed by SIGTERM",
    "_exit": "exited with status 3 before its stage had returned",
    "exception": "raised InjectedError: injected",
    "stall": "",
    "zombie": "",
}

OUTCOMES: dict[str, dict[str, set[str]]] = {
    "writing": {"SIGTERM": {"committed"}, "stall": {"committed"}},
    "published": {"exception": {"committed", "lost"}, "zombie": {"committed", "lost"}},
    "reading": {"stall": {"committed"}},
    "committing": {"SIGTERM": {"filtered"}, "exception": {"filtered", "lost"}, "stall": {"filtered"}},
    "idle": {"stall": {"committed"}, "exception": {"lost", "unsent"}},
    "shutdown": {},
}
"""The outcomes of the record at which the fault is injected into the middle stage, other than `USUAL_OUTCOMES`."""

USUAL_OUTCOMES = {
    "writing": {"lost"},
    "published": {"committed"},
    "reading": {"lost"},
    "committing": {"lost"},
    "idle": {"committed", "lost"},  # it may be in transit to the ended worker
    "shutdown": {"committed"},
}


def _judge_middle(cell: Cell, history: History) -> None:
    report = _judge_report(history)
    injected = f"Middle 1/1 (pid {history.injected[0]}) {MIDDLE_DIED[cell.fault]}"
    filtered, lost = report["ended"]["filtered"], report["ended"]["lost"]
    assert report["ended"]["trained"] == TRAJECTORIES * len(history.committed)
    assert filtered in {0, TRAJECTORIES}
    if AT in history.committed:
        outcome = "committed"
    elif filtered:
        outcome = "filtered"
    else:
        outcome = "lost" if AT in [number for number, _ in history.all("sent")] else "unsent"
    assert outcome in OUTCOMES[cell.moment].get(cell.fault, USUAL_OUTCOMES[cell.moment])
    # SIGTERM lets the worker send what it has: that its stage has returned. Nothing is lost, and none is restarted.
    returned = (cell.fault, cell.moment) == ("SIGTERM", "shutdown")
    assert history.noticed == ("" if cell.stops or returned else injected)
    if cell.fault in {"exception", "zombie"}:
        return
    assert report["stop_reason"] == "end of stream"
    assert report["restarts"] == (0 if cell.fault == "stall" or returned else 1)
    assert len(history.all("sent")) == COUNT
    if cell.fault == "stall" or cell.moment == "shutdown":
        assert not lost
    assert set(report["reasons"]["lost"]) == ({injected} if lost else set())


def _judge_supervisor(cell: Cell, history: History) -> None:
    assert history.committed == list(range(len(history.committed)))
    committed = {"idle": AT, "reading": AT, "committing": AT, "shutdown": AT + 1}.get(cell.moment)
    if committed is not None and cell.fault == "SIGTERM":
        assert committed <= len(history.committed) < COUNT  # the sink finishes its present record
    elif committed is not None and (cell.fault != "stall" or cell.moment == "shutdown"):
        assert len(history.committed) == committed
    if cell.dies:
        history.expect_soon(history.ended_at)
        return
    report = _judge_report(history)
    in_the_act = (cell.fault, cell.moment) == ("exception", "committing")  # committed, and not in the log
    assert report["ended"]["trained"] == TRAJECTORIES * (len(history.committed) + in_the_act)
    assert report["restarts"] == 0
    if cell.fault == "SIGTERM":
        assert report["stop_reason"] == "stopped by SIGTERM"
    elif cell.fault == "exception":
        assert "raised InjectedError: injected" in history.noticed
    elif cell.moment != "shutdown":
        assert len(history.committed) == COUNT
        assert report["stop_reason"] == "end of stream"


ROLES: dict[str, Callable[[Cell, History], None]] = {
    "producer": _judge_consumer_survives,
    "consumer": _judge_producer_survives,
    "middle": _judge_middle,
    "supervisor": _judge_supervisor,
}
