"""Start a command through a subreaper, and describe its end; the parent's side of `subreaper.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from . import subreaper


@dataclass(frozen=True, slots=True)
class SubreaperProcess:
    """A subreaper that was started, and its pipes. The caller reaps it, and closes both descriptors."""

    popen: subprocess.Popen[bytes]
    stop_fd: int
    """Write end of a pipe: the subreaper ends the command when a byte is written to it, or when it is closed."""
    status_fd: int
    """Read end of a pipe with the subreaper's status lines, see `subreaper.py`, until the subreaper has ended."""


def subreaper_command(
    command: Sequence[str], stop_timeout_s: float, stop_fd: int, status_fd: int, folder: str = ""
) -> list[str]:
    """Return the command of a subreaper that starts `command` for this process, and inherits these descriptors.

    It removes `folder` once no process of the command is left.
    """
    options = [str(os.getpid()), str(stop_timeout_s), str(stop_fd), str(status_fd), folder]
    return [sys.executable, "-I", "-S", subreaper.__file__, *options, *command]


def start_subreaper(
    command: Sequence[str],
    stop_timeout_s: float,
    *,
    pass_fds: Sequence[int] = (),
    stdin: IO[bytes] | None = None,
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str = "",
) -> SubreaperProcess:
    """Start a subreaper that starts `command`. Blocks.

    Args:
        command: program and arguments; no shell.
        stop_timeout_s: seconds between SIGTERM and SIGKILL.
        pass_fds: descriptors that the command inherits.
        stdin: the file that the command reads; None for an empty one.
        output: the file for both output streams of the command; None for the streams of this process.
        environment: that of the command; None for the environment of this process.
        folder: removed once no process of the command is left, also if this process dies.

    Raises:
        OSError: the subreaper cannot be started; no descriptor stays open.
    """
    (stop_read, stop_fd), (status_fd, status_write) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    try:
        popen = subprocess.Popen(  # noqa: S603 (the user's command)
            subreaper_command(command, stop_timeout_s, stop_read, status_write, folder),
            stdin=stdin or subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(stop_read, status_write, *pass_fds),
            start_new_session=True,
        )
    except BaseException:
        os.close(stop_fd)
        os.close(status_fd)
        raise
    finally:
        os.close(stop_read)
        os.close(status_write)
    return SubreaperProcess(popen, stop_fd, status_fd)


def describe_end(status: str, value: int) -> str:
    """Describe the end of a command by a subreaper's line `refused <errno>` or `ended <wait status>`."""
    if status == "refused":
        return f"could not be started: {os.strerror(value)}"
    return describe_exit(os.waitstatus_to_exitcode(value))


def describe_exit(code: int) -> str:
    """Describe the exit of a process by its exit code, negative for a signal."""
    if code >= 0:
        return f"exited with status {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
