"""`penstock report`, and its server, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = (sys.executable, "-m", "penstock", "report")


def write_page(*folders: Path) -> None:
    """Write `report.html` into the first folder; in a process, for the driver of the browser has an event loop."""
    subprocess.run([*COMMAND, *map(str, folders)], check=True, capture_output=True)


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """Serve the page of some runs within the body; yield its URL."""
    with subprocess.Popen([*COMMAND, "--serve", *map(str, folders)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield line.split()[1]
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
