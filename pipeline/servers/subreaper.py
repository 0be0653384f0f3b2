"""The process between penstock and a server of others: it starts the server, and ends all processes of the server.

A script of its own that imports the standard library alone, so that it starts at once and has no threads. It is a
subreaper: every process that the server started becomes its child once it is orphaned. It signals only children that it
has not reaped, whose ids cannot refer to other processes, and continues until it has no child left: then no process of
the server is left. It does so when it is asked to, when the server ends, and when the process that started it dies, in
any way. If the subreaper itself is killed, the kernel kills the server, but not the processes that the server had
started.

    python -I -S subreaper.py <parent's pid> <stop timeout in seconds> <stop descriptor> <status descriptor> <folder> \
        <command> …

A byte on the stop descriptor, or its end, means: stop. The folder, unless it is empty text, is removed at the end. The
status consists of lines: `started <pid>`, `refused <errno>`, `ended <wait status>`.
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


def main(parent: int, stop_timeout_s: float, pipes: tuple[int, int], folder: str, command: list[str]) -> None:
    """Run one server, until no process of it is left; then remove `folder`, unless it is empty text."""
    try:
        _run(parent, stop_timeout_s, *pipes, command)
    finally:
        if folder:
            _remove(folder)


def _remove(folder: str) -> None:
    import shutil  # noqa: PLC0415 (its import takes longer than that of all others)

    shutil.rmtree(folder, ignore_errors=True)


def _run(parent: int, stop_timeout_s: float, stop_fd: int, status_fd: int, command: list[str]) -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for descriptor in (stop_fd, status_fd):
        os.set_inheritable(descriptor, False)
    signals = _open_signal_pipe()
    parent_fd = os.pidfd_open(parent)
    if os.getppid() != parent:
        return
    server = _start(command, prctl, status_fd)
    if server is None:
        return
    _report(status_fd, f"started {server}")
    poll = select.poll()
    for descriptor in (stop_fd, parent_fd, signals):
        poll.register(descriptor, select.POLLIN)
    stop = False
    while not stop:
        ready = {descriptor for descriptor, _ in poll.poll()}
        stop = signal.SIGTERM in _drained(signals) or bool(ready & {stop_fd, parent_fd})
        stop |= _reap(server, status_fd)
    _end(signals, time.monotonic() + stop_timeout_s, lambda: _reap(server, status_fd))


def _open_signal_pipe() -> int:
    """Return a descriptor that the numbers of signals arrive on: SIGCHLD and SIGTERM."""
    signals, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return signals


def _drained(signals: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(signals, 65_536)  # more than the pipe holds
    return b""


def _start(command: list[str], prctl: Callable[..., int], status_fd: int) -> int | None:
    """Start the server in a session of its own, to be killed with this process; return its pid, None if refused."""
    subreaper = os.getpid()
    error_read, error_write = os.pipe()
    server = os.fork()
    if not server:
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == subreaper:
                os.execvp(command[0], command)  # noqa: S606 (the user's command)
        except OSError as error:
            os.write(error_write, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(error_write)
    refused = os.read(error_read, 16)  # ends when the server's program has begun
    os.close(error_read)
    if refused:
        os.waitpid(server, 0)
        _report(status_fd, f"refused {refused.decode()}")
        return None
    return server


def _reap(server: int, status_fd: int) -> bool:
    """Reap children that have ended; report the end of the server, and return whether it has ended."""
    found = False
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            if child[0] == server:
                _report(status_fd, f"ended {child[1]}")
                found = True
    return found


def _end(signals: int, deadline: float, reap: Callable[[], object]) -> None:
    """Send SIGTERM to every child, those that become one meanwhile included; from the deadline on SIGKILL."""
    terminated: set[int] = set()
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    while _has_children():
        children = _children()
        left_s = deadline - time.monotonic()
        for child in children - terminated if left_s > 0 else children:
            with contextlib.suppress(PermissionError):  # a program that changed its user
                os.kill(child, signal.SIGTERM if left_s > 0 else signal.SIGKILL)
        terminated |= children
        poll.poll(left_s * 1000 + 1 if left_s > 0 else None)
        _drained(signals)
        reap()


def _has_children() -> bool:
    """Return whether any child is left, ended or not."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> set[int]:
    """Return the present children; one that becomes one meanwhile may be missing."""
    me, found = str(os.getpid()), set[int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            *_, after_the_name = path.read_text().rpartition(")")
            if after_the_name.split()[1] == me:
                found.add(int(path.parent.name))
    return found


def _report(status_fd: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status_fd, f"{line}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])), sys.argv[5], sys.argv[6:])
