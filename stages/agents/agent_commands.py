"""Run the command of an agent: its processes end with the rollout, however either ends."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import anyio
import anyio.to_thread
import msgspec

from ..._pipeline.errors import PenstockError
from ..._pipeline.servers.subreaper_process import SubreaperProcess, describe_end, start_subreaper

STOP_S = 2.0
"""Seconds between SIGTERM and SIGKILL for what a command has left, and for a command that is given up."""

OUTPUT_BYTES = 2**20
"""Bytes of the end of a command's output that are kept."""

SHOWN = 2000
"""Characters of the end of the output in an error."""


class CommandFailed(PenstockError):
    """A command of an agent could not be started, or ended with another status than 0."""


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a command."""

    status: int
    """Of its exit; negative for a signal."""
    output: str
    """Its output on both streams: the last MiB."""


async def run_command(
    command: Sequence[str | Path], environment: Mapping[str, str], folder: str | Path | None = None, *, check: bool
) -> CommandResult:
    """Run a command to its end. When that comes, or this is cancelled, or this process dies, all its processes end.

    Args:
        command: program and arguments; no shell.
        environment: variables beside those of this process.
        folder: working directory; by default that of this process.
        check: whether another status than 0 is an error.

    Raises:
        CommandFailed: it could not be started, or ended with another status while `check` is true.
    """
    arguments = [str(each) for each in command]
    if folder is not None:
        arguments = ["env", f"--chdir={folder}", *arguments]
    output = await anyio.to_thread.run_sync(tempfile.TemporaryFile)
    try:
        status, value = await _run(arguments, environment, output)
        text = await anyio.to_thread.run_sync(_end_of, output)
    finally:
        output.close()
    if status == "refused" or (check and value):
        raise CommandFailed(
            f"expected the command {arguments[0]!r} to end with status 0, it {describe_end(status, value)}: "
            f"{text.strip()[-SHOWN:] or 'without output'}"
        )
    return CommandResult(status=os.waitstatus_to_exitcode(value), output=text)


async def _run(arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> tuple[str, int]:
    """Run a command until none of its processes is left; return the line of its end, see `subreaper.py`."""
    start = partial(start_subreaper, arguments, STOP_S, output=output, environment={**os.environ, **environment})
    process = await anyio.to_thread.run_sync(start)
    try:
        return await _last_status(process)
    finally:
        os.close(process.stop_fd)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(process.popen.wait)
        os.close(process.status_fd)


async def _last_status(process: SubreaperProcess) -> tuple[str, int]:
    os.set_blocking(process.status_fd, False)
    said = b""
    while True:
        for line in said.split(b"\n")[:-1]:
            status, value = line.decode().split()
            if status != "started":
                return status, int(value)
        await anyio.wait_readable(process.status_fd)
        read = os.read(process.status_fd, 512)
        if not read:  # the subreaper was killed, and with it the kernel has killed the command
            return "ended", int(signal.SIGKILL)
        said += read


def _end_of(output: IO[bytes]) -> str:
    """Return the end of what a command wrote. Blocks."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
    return output.read().decode(errors="replace")
