"""Run one cell: fork its actors, read their log to its end, and check it.

The log ends when the last process that could write it has ended; orphans are reaped here.
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
from tests.faults.actors import Log, Setup, run_actor
from tests.faults.cells import STOP_TIMEOUT_S, Cell
from tests.faults.channel_actors import consume, consume_with_fault, produce, produce_with_fault
from tests.faults.pipeline_actors import run_pipeline
from tests.faults.verdict import History, judge

from penstock._pipeline.channels.socket_directory import socket_directory

__all__ = ["run_cell"]

PR_SET_CHILD_SUBREAPER = 36

ACTORS: dict[str, tuple[Callable[[Setup], Any], ...]] = {
    "producer": (produce_with_fault, consume),
    "consumer": (consume_with_fault, produce),
    "middle": (run_pipeline,),
    "supervisor": (run_pipeline,),
}
"""The actors of each role, the victim first; a middle stage's worker is started by the pipeline."""


def run_cell(cell: Cell) -> None:
    """Run `cell` in processes forked from this one, which has no threads and no event loop.

    Raises:
        AssertionError: a rule is broken.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder  # the folder of sockets
        history = _observe(cell)
        if cell.role == "supervisor" or (cell.role == "consumer" and cell.dies):
            with socket_directory():  # the next process removes sockets of dead ones
                pass
        left = [str(path) for path in Path(folder).rglob("*")]
        assert not left, f"expected no socket to be left, got {left}"
    assert not list(Path("/dev/shm").glob("*penstock*"))  # noqa: S108 (looked at, not written)
    judge(cell, history)


def _observe(cell: Cell) -> History:
    (log, writer), (injected_reader, injected_writer), url = os.pipe(), os.pipe(), os.pipe()
    given = Setup(cell, Log(writer), injected_reader, url)
    pids = []
    for act in ACTORS[cell.role]:
        pids.append(_forked(given, act))
        given.victim = pids[0]
    os.close(writer)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(int(FAILSAFE_S))
    lines = list(_log_lines(log, cell, injected_writer))
    ended_at = time.monotonic()
    statuses = dict(_exit_statuses())
    signal.alarm(0)
    return History(lines, pids, statuses, ended_at)


def _forked(given: Setup, act: Callable[[Setup], Any]) -> int:
    pid = os.fork()
    if not pid:
        status = 70
        try:
            status = run_actor(given, act)
        finally:
            os._exit(status)
    return pid


def _log_lines(log: int, cell: Cell, injected_writer: int) -> Iterator[list[Any]]:
    """Yield the lines of the log as they are written; meanwhile wait for a process that stops, and continue it."""
    stopped, done = 0, False
    with open(log, "rb") as file:
        for encoded in file:
            line = msgspec.json.decode(encoded)
            yield line
            match line:
                case ["injected", pid, _]:
                    if cell.stops:
                        stopped = pid
                        _wait_until_stopped(pid)
                    os.write(injected_writer, b"!")
                    if cell.fault == "stall":
                        time.sleep(STOP_TIMEOUT_S * 1.5)
                        os.kill(pid, signal.SIGCONT)
                case ["done"]:
                    done = True
            if stopped and done and cell.fault == "zombie":  # in either order
                os.kill(stopped, signal.SIGCONT)
                stopped = 0


def _wait_until_stopped(pid: int) -> None:
    """Poll the state of `pid`: Linux notifies only the parent of a stopped process, and this may be a grandparent."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def _exit_statuses() -> Iterator[tuple[int, int]]:
    """Yield the process id and the status of every child of this process, until there is none."""
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
