"""The ZeroMQ context of penstock: one in each process, made on first use, and apart from `zmq.Context.instance()`.

The user's own code may use that one, so its options and its sockets are not penstock's. A context is never terminated:
its sockets are closed by their owners, and its threads end with the process.
"""

from __future__ import annotations

import os
import threading
from functools import cache

import zmq


class _ProcessContext:
    """The context of this process. Any thread may get it."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inherited: list[zmq.Context[zmq.Socket[bytes]]] = []
        """Contexts of the processes that this one was forked from. Their threads do not exist here, and a context that
        is collected closes its sockets, so they are kept."""
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._reset)

    def get(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if self._context is None:
                self._context = _new_context()
            return self._context

    def _reset(self) -> None:
        """Start anew in a forked process, where a thread that no longer exists may have held the lock."""
        self._lock = threading.Lock()
        if self._context is not None:
            self._inherited.append(self._context)
            self._context = None


def _new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a new context, whose I/O threads are batch work.

    One of them is woken by every message, and would take the core from the thread that copies records there; up to a
    fifth of the throughput goes into that (docs/performance.md). Where a core is idle they run at once all the same.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))  # file descriptors are the limit: 8 bytes for each
    if _may_run_as_batch_work():
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


@cache
def _may_run_as_batch_work() -> bool:
    """Return whether this process has the usual policy and may change it; if not, ZeroMQ would abort the process."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    try:
        for policy in (os.SCHED_BATCH, os.SCHED_OTHER):
            os.sched_setscheduler(0, policy, os.sched_param(0))
    except OSError:
        return False
    return True


zmq_context = _ProcessContext().get
"""Return the ZeroMQ context of this process."""
