"""Run the command of an agent: its processes end with the rollout, however either ends."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, Self

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
    command: Sequence[str | Path],
    environment: Mapping[str, str],
    folder: str | Path | None = None,
    *,
    stdin: str = "",
    check: bool,
) -> CommandResult:
    """Run a command to its end. When that comes, or this is cancelled, or this process dies, all its processes end.

    Its temporary files are in a folder of its own, TMPDIR, which is removed at the end.

    Args:
        command: program and arguments; no shell.
        environment: variables beside those of this process.
        folder: working directory; by default that of this process.
        stdin: text that it reads.
        check: whether another status than 0 is an error.

    Raises:
        CommandFailed: it could not be started, or ended with another status while `check` is true.
    """
    arguments = [str(each) for each in command]
    if folder is not None:
        arguments = ["env", f"--chdir={folder}", *arguments]
    async with _files(stdin) as files:
        status, value = await _run(arguments, environment, files)
        printed = await anyio.to_thread.run_sync(_end_of, files.output)
    if status == "refused" or (check and value):
        raise CommandFailed(
            f"expected the command {arguments[0]!r} to end with status 0, it {describe_end(status, value)}: "
            f"{printed.strip()[-SHOWN:] or 'without output'}"
        )
    return CommandResult(status=os.waitstatus_to_exitcode(value), output=printed)


class _Files(NamedTuple):
    """The files of a command."""

    stdin: IO[bytes]
    output: IO[bytes]
    temporary: str
    """The folder of its temporary files."""

    @classmethod
    def make(cls, text: str) -> Self:
        """Make them. Blocks."""
        written = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `remove`)
        written.write(text.encode())
        written.seek(0)
        return cls(written, tempfile.TemporaryFile(), tempfile.mkdtemp(prefix="penstock-agent-"))

    def remove(self) -> None:
        """Close and remove them. Blocks."""
        self.stdin.close()
        self.output.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


@asynccontextmanager
async def _files(text: str) -> AsyncGenerator[_Files]:
    files = await anyio.to_thread.run_sync(_Files.make, text)
    try:
        yield files
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(files.remove)


async def _run(arguments: Sequence[str], environment: Mapping[str, str], files: _Files) -> tuple[str, int]:
    """Run a command until none of its processes is left; return the line of its end, see `subreaper.py`."""
    start = partial(
        start_subreaper,
        arguments,
        STOP_S,
        stdin=files.stdin,
        output=files.output,
        environment={**os.environ, **environment, "TMPDIR": files.temporary},
        folder=files.temporary,
    )
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
