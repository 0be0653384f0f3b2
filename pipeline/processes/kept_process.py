"""The parent's side of `subreaper.py`: it starts a command through a subreaper, and reads how the command ended."""

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

__all__ = ["KeptProcess", "describe_end", "start_kept"]


@dataclass(frozen=True, slots=True)
class KeptProcess:
    """A subreaper that was started, and the pipes to it. The caller reaps it, and closes both descriptors."""

    subreaper: subprocess.Popen[bytes]
    config: int
    """Descriptor: the subreaper ends the command when something is written to it, or when it is closed."""
    words: int
    """Descriptor of the subreaper's lines, see `subreaper.py`; there is nothing more to read when the subreaper has
    ended."""


def start_kept(
    command: Sequence[str],
    stop_timeout_s: float,
    *,
    pass_fds: Sequence[int] = (),
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
) -> KeptProcess:
    """Start a subreaper, which starts `command`. Blocks.

    Args:
        command: program and arguments; no shell.
        stop_timeout_s: from SIGTERM to SIGKILL.
        pass_fds: descriptors that the command inherits.
        output: the command prints there, to either stream; None for the streams of this process.
        environment: of the command; None for that of this process.

    Raises:
        OSError: the subreaper cannot be started; no descriptor stays open.
    """
    (hears, config), (words, says) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    options = [str(os.getpid()), str(stop_timeout_s), str(hears), str(says)]
    try:
        popen = subprocess.Popen(  # noqa: S603 (what the user wants run)
            [sys.executable, "-I", "-S", subreaper.__file__, *options, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=(hears, says, *pass_fds),
            start_new_session=True,
        )
    except BaseException:
        os.close(config)
        os.close(words)
        raise
    finally:
        os.close(hears)
        os.close(says)
    return KeptProcess(popen, config, words)


def describe_end(word: str, value: int) -> str:
    """Return how a command ended, of the words of a subreaper's line `refused <errno>` or `ended <wait status>`."""
    if word == "refused":
        return f"could not be started: {os.strerror(value)}"
    if os.WIFSIGNALED(value):
        with suppress(ValueError):
            return f"was killed by {signal.Signals(os.WTERMSIG(value)).name}"
        return f"was killed by signal {os.WTERMSIG(value)}"
    return f"exited with status {os.waitstatus_to_exitcode(value)}"
