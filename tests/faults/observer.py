"""Plays one cell: forks its actors, reads their log to its end, and judges what it says.

The log ends when the last process is gone that could write it; whoever was orphaned is reaped here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
from tests.failsafe import FAILSAFE_S
from tests.faults.actors import Log, Play, perform
from tests.faults.cells import BOUND_S, Cell
from tests.faults.channel_actors import consume, consume_and_be_struck, produce, produce_and_be_struck
from tests.faults.pipeline_actors import run_pipeline
from tests.faults.verdict import Story, judge

from penstock._pipeline.channels.socket_directory import socket_directory

__all__ = ["play"]

PR_SET_CHILD_SUBREAPER = 36

ACTORS: dict[str, tuple[Callable[[Play], Any], ...]] = {
    "producer": (produce_and_be_struck, consume),
    "consumer": (consume_and_be_struck, produce),
    "middle": (run_pipeline,),
    "supervisor": (run_pipeline,),
}
"""Who plays, the victim first; a middle stage's worker is started by the pipeline."""


def play(cell: Cell) -> None:
    """Play `cell` in processes forked from this one, which has no threads and no event loop.

    Raises:
        AssertionError: a promise was broken.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # where sockets live
        story = _observe(cell)
        if cell.role == "supervisor" or (cell.role == "consumer" and cell.dies):
            with socket_directory():  # whoever comes next sweeps what nobody outlived
                pass
        left = [str(path) for path in Path(folder).rglob("*")]
        assert not left, f"expected no socket to be left, got {left}"
    assert not list(Path("/dev/shm").glob("*penstock*"))  # noqa: S108 (looked at, not written)
    judge(cell, story)


def _observe(cell: Cell) -> Story:
    (log, writer), (go, went), url = os.pipe(), os.pipe(), os.pipe()
    given = Play(cell, Log(writer), go, url)
    pids = []
    for act in ACTORS[cell.role]:
        pids.append(_forked(given, act))
        given.victim = pids[0]
    os.close(writer)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(int(FAILSAFE_S))
    lines = list(_heard(log, cell, went))
    gone_at = time.monotonic()
    statuses = dict(_reaped())
    signal.alarm(0)
    return Story(lines, pids, statuses, gone_at)


def _forked(given: Play, act: Callable[[Play], Any]) -> int:
    pid = os.fork()
    if not pid:
        status = 70
        try:
            status = perform(given, act)
        finally:
            os._exit(status)
    return pid


def _heard(log: int, cell: Cell, went: int) -> Iterator[list[Any]]:
    """The lines of the log as they come; meanwhile whoever stopped himself is waited for, and woken."""
    stopped, given_up = 0, False
    with open(log, "rb") as file:
        for encoded in file:
            line = msgspec.json.decode(encoded)
            yield line
            match line:
                case ["struck", pid, _]:
                    if cell.stops:
                        stopped = pid
                        _wait_until_stopped(pid)
                    os.write(went, b"!")
                    if cell.fault == "stall":
                        time.sleep(BOUND_S * 1.5)
                        os.kill(pid, signal.SIGCONT)
                case ["done"]:
                    given_up = True
            if stopped and given_up and cell.fault == "zombie":  # whichever of the two is heard first
                os.kill(stopped, signal.SIGCONT)
                stopped = 0


def _wait_until_stopped(pid: int) -> None:
    """Linux tells only a parent when a process stops, and this one may be a grandparent."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def _reaped() -> Iterator[tuple[int, int]]:
    """Every process that was left to this one, with its status, until there is none."""
    while True:
        try:
            yield os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _out_of_time(_: int, __: FrameType | None) -> NoReturn:
    pids = [int(pid) for pid in _children_of(os.getpid())]
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)  # they print what they wait for
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"expected the cell to be over within {FAILSAFE_S} s")


def _children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
