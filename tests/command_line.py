"""The command `penstock`, in this process: an interpreter of its own takes a second to start."""

from __future__ import annotations

import io
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from penstock._cli import main


def ran(*arguments: object) -> tuple[int, str]:
    """Run a command; return its status, and what it printed to both streams, the line of an error at the end."""
    printed, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(printed), redirect_stderr(printed):
        patched.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        patched.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
    signal.signal(signal.SIGINT, handler)
    status = ended.value.code
    return (1, f"{printed.getvalue()}{status}\n") if isinstance(status, str) else (status or 0, printed.getvalue())
