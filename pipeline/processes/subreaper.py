"""The process between penstock and a server that is not penstock's: it starts the server, and ends all that it became.

A script of its own that imports the standard library alone, so that it starts at once and has no threads. It is a
subreaper: what the server started, and what was orphaned on the way, becomes its child sooner or later. It signals only
children that it has not reaped, whose ids can mean nobody else, and goes on until it has no child left, which is the
proof that nothing of the server is left. It does so when it is told to, when the server ends, and when the process that
started it dies, however that happens. Should the subreaper itself be killed, the kernel kills the server; what the
server had started is then beyond anybody's reach.

    python -I -S subreaper.py <parent's pid> <seconds to stop in> <descriptor of orders> <descriptor of words> <command>
    …

What is written to the orders, or their end, means: stop. The words are lines: `started <pid>`, `refused <errno>`,
`ended <wait status>`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, stop_timeout_s: float, config: int, words: int, command: list[str]) -> None:
    """Keep one server, until nothing of it is left."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for descriptor in (config, words):
        os.set_inheritable(descriptor, False)
    wakes = _wakes()
    parent_fd = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    server = _start(command, prctl, words)
    if server is None:
        return
    _tell(words, f"started {server}")
    poll = select.poll()
    for descriptor in (config, parent_fd, wakes):
        poll.register(descriptor, select.POLLIN)
    stop = False
    while not stop:
        ready = {descriptor for descriptor, _ in poll.poll()}
        stop = signal.SIGTERM in _drained(wakes) or bool(ready & {config, parent_fd})
        stop |= _reap(server, words)
    _end(wakes, time.monotonic() + stop_timeout_s, lambda: _reap(server, words))


def _wakes() -> int:
    """Return a descriptor that gives the numbers of signals: a child has ended, or this process is to."""
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return wakes


def _drained(wakes: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(wakes, 65_536)  # more than the pipe holds
    return b""


def _start(command: list[str], prctl: Callable[..., int], words: int) -> int | None:
    """Return the server's pid; in a session of its own, and killed by the kernel should this process die."""
    subreaper = os.getpid()
    hears, says = os.pipe()
    server = os.fork()
    if not server:
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == subreaper:
                os.execvp(command[0], command)  # noqa: S606 (what the user wants run)
        except OSError as error:
            os.write(says, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(says)
    refused = os.read(hears, 16)  # ends when the server's program has begun
    os.close(hears)
    if refused:
        os.waitpid(server, 0)
        _tell(words, f"refused {refused.decode()}")
        return None
    return server


def _reap(server: int, words: int) -> bool:
    """Let children that have ended be gone; tell how the server ended, and return whether it did."""
    found = False
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            if child[0] == server:
                _tell(words, f"ended {child[1]}")
                found = True
    return found


def _end(wakes: int, deadline: float, reap: Callable[[], object]) -> None:
    """SIGTERM to every child, those that become one on the way included; from the deadline on SIGKILL."""
    asked: set[int] = set()
    poll = select.poll()
    poll.register(wakes, select.POLLIN)
    while _has_children():
        children = _children()
        left_s = deadline - time.monotonic()
        for child in children - asked if left_s > 0 else children:
            with contextlib.suppress(PermissionError):  # a program that became another user's
                os.kill(child, signal.SIGTERM if left_s > 0 else signal.SIGKILL)
        asked |= children
        poll.poll(left_s * 1000 + 1 if left_s > 0 else None)
        _drained(wakes)
        reap()


def _has_children() -> bool:
    """Return whether any is left, ended or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> set[int]:
    """Children that there are now; one that becomes one meanwhile may be missing."""
    me, found = str(os.getpid()), set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            *_, after_the_name = path.read_text().rpartition(")")
            if after_the_name.split()[1] == me:
                found.add(int(path.parent.name))
    return found


def _tell(words: int, word: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(words, f"{word}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
