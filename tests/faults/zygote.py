"""One interpreter that has imported everything and forks for each cell: a cell then costs milliseconds to start.

It has no thread and no event loop, so its forks are like new processes. `python -m tests.faults.zygote` is the process,
`Zygote` the interface of the tests to it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import msgspec
from tests.faults.cells import Cell

__all__ = ["ROOT", "Zygote", "environment"]

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return the environment of an interpreter that forks: this checkout, no threads of numpy, no tracing."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return inherited | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}


class Zygote:
    """The process, within the body. Several threads may call `run_cell`."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "tests.faults.zygote"]
        self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment(), cwd=ROOT)
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # the end of its requests
        self._process.wait()

    def run_cell(self, cell: Cell, mutant: str = "") -> str:
        """Run a cell, after the mutation `mutant` if there is one, and return its problems; empty if there are none."""
        reader, writer = os.pipe()
        with open(reader, "rb") as verdict:  # noqa: PTH123 (a descriptor)
            socket.send_fds(self._socket, [msgspec.json.encode((cell, mutant))], [writer])
            os.close(writer)
            return verdict.read().decode()


def main() -> None:
    """Fork for every request; the error that the fork prints is the answer."""
    from tests.faults.mutants import mutate  # noqa: PLC0415 (what is forked; the other side needs none of it)
    from tests.faults.observer import run_cell  # noqa: PLC0415 (likewise)

    requests = socket.socket(fileno=0)
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 1000, 1)
        if not request:
            with suppress(ChildProcessError):
                while True:
                    os.wait()
            return
        if not os.fork():
            requests.close()
            cell, mutant = msgspec.json.decode(request, type=tuple[Cell, str])
            if mutant:
                mutate(mutant)
            _answer(cell, fds[0], run_cell)
        os.close(fds[0])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _answer(cell: Cell, fd: int, run_cell: Callable[[Cell], None]) -> NoReturn:
    """Run `cell` in this fork. The output of its processes is part of the answer if there is a problem."""
    printed = os.memfd_create("printed")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(printed, stream.fileno())
    try:
        run_cell(cell)
    except BaseException:  # noqa: BLE001 (whatever it is, it is the answer)
        wrong = traceback.format_exc().encode()
        os.write(fd, wrong + b"\nprinted:\n" + os.pread(printed, 20_000, 0))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
