"""Checks of the machine for `penstock doctor`: shared memory, descriptors, sockets, processors, memory."""

from __future__ import annotations

import array
import os
import resource
import socket
import stat
from pathlib import Path

from .._pipeline.channels.channel import REMOTE_CAPACITY_BYTES
from .._pipeline.channels.machine_memory import available_bytes
from .._pipeline.channels.shared_memory import allocate
from .._pipeline.channels.socket_directory import socket_directory
from .._pipeline.util.os_errors import RAISE_LIMIT
from .._pipeline.workers.numa import nodes_of
from .._pipeline.workers.workers import FEED_DESCRIPTORS, SPARE_DESCRIPTORS, WORKER_DESCRIPTORS
from .findings import Finding

FEWEST_DESCRIPTORS = 64
"""Of a process with a source and a stage in one worker each; tests/limits counts them."""

FEW_DESCRIPTORS = 256

RUN_DESCRIPTORS = 32
"""Of a run without its workers: those of ZeroMQ, of the event loop and of the channels."""

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The number that Linux gives to the namespace of the host; a container has another."""

WORKERS = "stages in processes (on=processes(n)) and shm:// channels will not work"

SEE_MESSAGE = "see the message above, which ends with what to change"


def machine_checks() -> list[Finding]:
    """Return the findings about this machine. Blocks."""
    return [
        processors(),
        numa(),
        memory(),
        shared_memory(),
        descriptors(),
        descriptor_passing(),
        pidfd(),
        runtime_folder(),
        namespaces(),
    ]


def processors() -> Finding:
    """Report the cores that this process may use, and the load."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    found = f"{cores} cores, load {load:.1f}"
    if load > cores:
        return Finding("processors", found, "note", "runs are slow: other processes compete", "end them, or wait")
    return Finding("processors", found)


def numa() -> Finding:
    """Report the NUMA nodes that have processors of this process."""
    nodes = nodes_of(os.sched_getaffinity(0))
    if len(nodes) > 1:
        return Finding("NUMA", f"{len(nodes)} nodes: a worker is bound to one, unless it can use more processors")
    return Finding("NUMA", f"{'1 node' if nodes else 'no nodes are named'}: there is nothing to bind workers to")


def memory() -> Finding:
    """Report the memory that is available to this process and its control group."""
    available = available_bytes()
    found = f"{available / 2**30:.1f} GiB available"
    if available < 2 * REMOTE_CAPACITY_BYTES:
        remedy = "free memory, or raise the limit of the control group (container)"
        return Finding("memory", found, "fails", "a run with a worker process will not start", remedy)
    return Finding("memory", found)


def shared_memory() -> Finding:
    """Allocate the segment that one worker has by default."""
    size = f"{REMOTE_CAPACITY_BYTES // 2**20} MiB"
    try:
        fd = allocate(REMOTE_CAPACITY_BYTES, "a worker", "free memory, or lower capacity_bytes")
    except OSError as error:
        return Finding("shared memory", str(error), "fails", WORKERS, SEE_MESSAGE)
    kind = Path(f"/proc/self/fd/{fd}").readlink().as_posix()
    os.close(fd)
    if kind.startswith("/memfd:"):
        return Finding("shared memory", f"{size} in a memfd")
    affects = "shm:// channels that are larger than /dev/shm will not open"
    return Finding("shared memory", f"{size} in /dev/shm, without memfd", "note", affects, "allow memfd_create")


def descriptors() -> Finding:
    """Report the limit of open files, and the number of workers it is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(list(Path("/proc/self/fd").iterdir()))
    workers = max(0, (free - RUN_DESCRIPTORS - SPARE_DESCRIPTORS) // (WORKER_DESCRIPTORS + FEED_DESCRIPTORS))
    found = f"{soft:,} of at most {hard:,}: enough for {workers:,} workers"
    if soft < FEWEST_DESCRIPTORS:
        return Finding("file descriptors", found, "fails", WORKERS, f"{RAISE_LIMIT} to 1024 or more")
    if soft < FEW_DESCRIPTORS:
        return Finding(
            "file descriptors",
            found,
            "note",
            "a run with more workers will not start",
            f"{RAISE_LIMIT} to 1024 or more",
        )
    return Finding("file descriptors", found)


def descriptor_passing() -> Finding:
    """Send a descriptor over a Unix socket."""
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            rights = array.array("i", [ours.fileno()]).tobytes()
            ours.sendmsg([b"-"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            _, received, _, _ = socket.recv_fds(theirs, 1, 1)
            for fd in received:
                os.close(fd)
    except OSError as error:
        remedy = "allow SCM_RIGHTS on Unix sockets in this sandbox"
        return Finding("passing descriptors", str(error), "fails", WORKERS, remedy)
    return Finding("passing descriptors", "over a Unix socket")


def pidfd() -> Finding:
    """Open a pidfd; workers are watched by theirs."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        affects, remedy = "stages in processes will not work", "allow pidfd_open in this sandbox, or use Linux 5.3"
        return Finding("pidfd", str(error), "fails", affects, remedy)
    return Finding("pidfd", "watches processes")


def runtime_folder() -> Finding:
    """Make a folder for sockets, as every channel between processes does."""
    try:
        with socket_directory() as folder:
            mode = stat.S_IMODE(folder.stat().st_mode)
    except OSError as error:
        remedy = "set XDG_RUNTIME_DIR to a folder where this user may write"
        return Finding("runtime folder", str(error), "fails", WORKERS, remedy)
    return Finding("runtime folder", f"{folder.parent}, sockets in folders of mode {mode:04o}")


def namespaces() -> Finding:
    """Report whether this process sees the processes of the host."""
    if Path("/proc/self/ns/pid").readlink().as_posix() == INITIAL_PID_NAMESPACE:
        return Finding("namespaces", "the processes of the host")
    return Finding("namespaces", "a container: shm:// reaches processes within it, tcp:// those outside")
