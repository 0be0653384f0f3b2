"""Another Python interpreter for a child process: one with packages of its own, penstock among them.

Its module path is its own: `PYTHONPATH` and `PYTHONHOME` are for the interpreter of this process, and are not passed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import suppress

from ..errors import InvalidConfig, MissingExtra
from .installation import NAME, install_command

PROBE = f"""
from importlib.metadata import version
print({NAME!r}, version({NAME!r}), flush=True)
import {NAME}._pipeline.workers.worker
print({NAME!r}, "is imported")
"""
"""Prints the version of penstock, after what the start of an interpreter may print, and imports what a worker needs."""

PRINTED_BYTES = 65_536
"""Kept of what a probe prints, from its end."""

OF_THIS_INTERPRETER = frozenset({"PYTHONPATH", "PYTHONHOME"})


def command_of(python: str, module: str, argument: str) -> list[str]:
    """Return a command that calls `main(argument)` of `module` with `python`; modules are also found in its folder."""
    # The folder is the last: one that is called penstock does not hide the package.
    code = f"import os, sys; sys.path.append(os.getcwd()); from {module} import main; main(sys.argv[1])"
    return [python, "-P", "-c", code, argument]


def environment_of() -> dict[str, str]:
    """Return the environment variables for a process of another interpreter."""
    return {name: value for name, value in os.environ.items() if name not in OF_THIS_INTERPRETER}


def check_interpreter(python: str, timeout_s: float, *, needs: str = "http") -> None:
    """Check that `python` is an interpreter with this version of penstock, which it can import. Blocks.

    The processes of its session end with it.

    Args:
        python: its path, or its name.
        timeout_s: seconds that it may take to answer.
        needs: the extra that the command which installs penstock names.

    Raises:
        InvalidConfig: it is no interpreter, or too old, or cannot import penstock.
        MissingExtra: it has another version, or none.
        TimeoutError: it does not answer within `timeout_s`.
    """
    try:
        status, lines = _run([python, "-P", "-c", PROBE], time.monotonic() + timeout_s)
    except TimeoutError:
        raise
    except (OSError, ValueError) as error:  # a ValueError: a path with a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfig(f"python: expected a Python interpreter, got {python!r}: {reason}") from error
    last = lines[-1] if lines else f"exit status {status}"
    said = [each.removeprefix(f"{NAME} ") for each in lines if each.startswith(f"{NAME} ")]
    found = "none" if "PackageNotFoundError" in last else next(iter(said), "")
    from importlib.metadata import distributions  # noqa: PLC0415 (it takes 60 ms, and few runs have another interpreter)

    ours = {each.version for each in distributions(name=NAME)}  # none where it is on the path of modules alone
    if found and ours and found not in ours:
        raise MissingExtra(
            f"python: expected {python} to have {NAME} {' or '.join(ours)}, got {found}: "
            f"{python} -m {install_command(needs)}"
        )
    if status or said[-1:] != ["is imported"]:
        raise InvalidConfig(
            f"python: expected a Python interpreter of version 3.11 or later that imports {NAME}, got {python!r}: "
            f"{last}"
        )


def _run(command: list[str], deadline: float) -> tuple[int, list[str]]:
    """Run a command in a session of its own, which ends with it; return its status and the last lines that it printed.

    Raises:
        OSError: it cannot be started.
        TimeoutError: it does not end by `deadline`.
    """
    with subprocess.Popen(  # noqa: S603 (the user's interpreter)
        command,
        env=environment_of(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            printed = _printed(process, deadline)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed.decode(errors="replace").strip().splitlines()


def _printed(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Return the end of what a process prints until it ends, whether or not others hold its output by then."""
    assert process.stdout is not None  # noqa: S101 (a pipe, as it was asked for)
    output, ended = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(output, False)
    printed, poll = b"", select.poll()
    poll.register(output, select.POLLIN)
    poll.register(ended, select.POLLIN)
    try:
        while ended not in (ready := dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            if output in ready:
                more = os.read(output, PRINTED_BYTES)
                printed = (printed + more)[-PRINTED_BYTES:]
                if not more:
                    poll.unregister(output)
        with suppress(BlockingIOError):
            printed += os.read(output, PRINTED_BYTES)
    finally:
        os.close(ended)
    return printed
