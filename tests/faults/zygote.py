"""One interpreter that has imported everything and forks for each cell: a cell then costs milliseconds to start.

It has no thread and no event loop, so what it forks is as good as new. `python -m tests.faults.zygote` is the process,
`Zygote` its side of whoever wants cells played.
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
    """For an interpreter that forks: it finds this checkout, numpy starts no threads, and it is not traced."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return inherited | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}


class Zygote:
    """The process, while the body runs. `play` may be called by several threads."""

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

    def play(self, cell: Cell, mutant: str = "") -> str:
        """Play a cell and return what was wrong: nothing, if all is well. `mutant` is what is broken beforehand."""
        reader, writer = os.pipe()
        with open(reader, "rb") as verdict:  # noqa: PTH123 (a descriptor)
            socket.send_fds(self._socket, [msgspec.json.encode((cell, mutant))], [writer])
            os.close(writer)
            return verdict.read().decode()


def main() -> None:
    """Fork for every request; what the fork prints as an error is the answer."""
    from tests.faults.mutants import mutate  # noqa: PLC0415 (what is forked; the other side needs none of it)
    from tests.faults.observer import play  # noqa: PLC0415 (likewise)

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
            _answer(cell, fds[0], play)
        os.close(fds[0])
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _answer(cell: Cell, fd: int, play: Callable[[Cell], None]) -> NoReturn:
    """Play `cell` in this fork. What its processes print belongs to the answer if something is wrong."""
    printed = os.memfd_create("printed")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(printed, stream.fileno())
    try:
        play(cell)
    except BaseException:  # noqa: BLE001 (whatever it is, it is the answer)
        wrong = traceback.format_exc().encode()
        os.write(fd, wrong + b"\nprinted:\n" + os.pread(printed, 20_000, 0))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
