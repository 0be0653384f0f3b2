"""Build the command and the payload of a child process: one starts this interpreter again, one is a pickled value.

The payload is an anonymous file that the child inherits, with two pickles: the preparation of the child's interpreter,
and the value.
"""

from __future__ import annotations

import io
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
from typing import Any

from ..channels.shared_memory import scratch
from ..util.interpreter import command_of, environment_of
from ..util.pickling import needs_main, pickled


def write_payload(value: object, *, prepared: bool = True) -> int:
    """Return the descriptor of a new payload. Blocks.

    Args:
        value: the value for the child.
        prepared: False for another interpreter: it keeps its module path and imports no script.
    """
    content = pickled(value)
    payload = scratch("payload")
    with open(payload, "wb", closefd=False) as file:
        file.write(pickle.dumps(_preparation(with_main=needs_main(content)) if prepared else {}))
        file.write(content)
    return payload


def open_payload(payload: int) -> io.BytesIO:
    """Return the content of the payload, and close its descriptor."""
    size = os.fstat(payload).st_size
    file = io.BytesIO(os.pread(payload, size, 0))  # siblings share the descriptor's position
    os.close(payload)
    return file


def child_program(python: str | None, module: str, argument: str) -> tuple[list[str], dict[str, str] | None]:
    """Return the command that calls `main(argument)` of `module`, and its variables, None for those of this process.

    Args:
        python: path of another interpreter; None for this one.
        module: the main module of the child.
        argument: its only one.
    """
    if python is None:
        return interpreter_command(module, argument), None
    return command_of(python, module, argument), environment_of()


def interpreter_command(module: str, argument: str) -> list[str]:
    """Return a command that calls `main(argument)` of `module` with this interpreter, its flags and its module path."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 (as multiprocessing does)
    path = [str(entry) or os.getcwd() for entry in sys.path]  # noqa: PTH109 (a string is wanted)
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main(sys.argv[1])"
    return [sys.executable, *flags, "-c", code, argument]


def _preparation(*, with_main: bool) -> dict[str, Any]:
    """Return the preparation that makes a child's interpreter like this one; it imports this script only if needed."""
    preparation = multiprocessing.spawn.get_preparation_data("penstock worker")
    unwanted = {"authkey", "start_method", "log_to_stderr", "log_level"}
    if not with_main:
        unwanted |= {"init_main_from_name", "init_main_from_path"}
    return {key: value for key, value in preparation.items() if key not in unwanted}
