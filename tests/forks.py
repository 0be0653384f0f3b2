"""Start `python -c` as a fork of a process that has imported penstock, which is most of the work of its start.

A fork begins as a new process does, for the forking process has neither a thread nor an event loop. It becomes a child
of the process that asks for it, with the descriptors, variables and folder that `subprocess.Popen` was given.
`python -m tests.forks` is the forking process, `Forks` the interface of the tests to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Self

import msgspec

__all__ = ["Forks"]

ROOT = Path(__file__).parents[1]

ON_PATH = [str(ROOT / "src"), str(ROOT)]

PR_SET_CHILD_SUBREAPER = 36

ASIDE = 500
"""Descriptors from here on are free while those of a fork are put at their places."""


class Program(msgspec.Struct, frozen=True):
    """What a fork runs."""

    code: str
    arguments: list[str]
    folder: str
    variables: dict[str, str]
    places: list[int]
    """Those of the descriptors that come with the request, in their order."""
    process_group: int
    new_session: bool


class Forks:
    """The forking process, within the body."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        variables = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
        variables |= {"PYTHONPATH": ":".join(ON_PATH)}
        command = [sys.executable, "-m", "tests.forks"]
        self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=variables, cwd=ROOT)
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # the end of its requests
        self._process.wait()

    def start(self, program: Program, descriptors: list[int]) -> int:
        """Return the id of a new child of this process."""
        with open(os.memfd_create("program"), "wb", buffering=0) as request:  # noqa: PTH123 (a descriptor)
            request.write(msgspec.json.encode(program))
            with self._lock:
                _adopt_orphans(True)
                try:
                    socket.send_fds(self._socket, [b"fork"], [request.fileno(), *descriptors])
                    return int(self._socket.recv(100))
                finally:
                    _adopt_orphans(False)

    @contextmanager
    def in_place_of_interpreters(self) -> Iterator[None]:
        """Fork within the body where `subprocess.Popen` would start `python -c`, unless that is traced."""
        start, started = self.start, vars(subprocess.Popen)["_execute_child"]

        def forked(self: Any, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
            _, pass_fds, folder, variables, _, _, shell, *pipes, _, gid, gids, uid, _, new_session, group = others
            as_another = shell or any(each is not None for each in (preexec_fn, gid, gids, uid))
            is_code = isinstance(args, list | tuple) and [*map(str, args[:2])] == [sys.executable, "-c"]
            if as_another or not is_code or "COVERAGE_PROCESS_CONFIG" in os.environ:
                started(self, args, executable, preexec_fn, *others)
                return
            standard = {place: place if pipe < 0 else pipe for place, pipe in enumerate((pipes[0], pipes[3], pipes[5]))}
            descriptors = standard | {number: number for number in pass_fds}
            program = Program(
                code=args[2],
                arguments=["-c", *map(os.fsdecode, args[3:])],
                folder=os.fsdecode(folder or os.getcwd()),  # noqa: PTH109 (a string is wanted)
                variables=dict(os.environ if variables is None else variables),
                places=list(descriptors),
                process_group=group,
                new_session=bool(new_session),
            )
            self.pid = start(program, list(descriptors.values()))
            self._child_created = True
            self._close_pipe_fds(*pipes)

        try:
            setattr(subprocess.Popen, "_execute_child", forked)  # noqa: B010 (private)
            yield
        finally:
            setattr(subprocess.Popen, "_execute_child", started)  # noqa: B010 (private)


def _adopt_orphans(adopts: bool) -> None:  # noqa: FBT001 (as the kernel has it)
    """Have a process whose parent ends become a child of this one, if it descends from it; or no more."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


# -- the forking process -----------------------------------------------------------------------------------------------


def main() -> tuple[CodeType, dict[str, Any]]:
    """Fork for every request, and return in each fork what it runs; exit when there are no more requests."""
    import penstock._cli.app  # noqa: PLC0415 (what is forked; the other side has it)
    import penstock._pipeline.workers.worker  # noqa: PLC0415, F401

    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:  # noqa: PTH123 (a device)
        os.dup2(null.fileno(), 0)
    gc.collect()
    gc.freeze()
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 10, 100)
        if not descriptors:
            sys.exit()
        reader, writer = os.pipe()
        parent = os.fork()
        if not parent:
            parent = os.getpid()
            if child := os.fork():
                os.write(writer, str(child).encode())
                os._exit(0)
            for descriptor in (requests.detach(), reader, writer):
                os.close(descriptor)
            return _begun(descriptors, parent)
        child_id = os.read(reader, 100)
        os.waitpid(parent, 0)  # from now on the child is one of the process that asks
        requests.send(child_id)
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _begun(descriptors: list[int], parent: int) -> tuple[CodeType, dict[str, Any]]:
    """Make this fork what `Popen` makes of a new process, and return what it runs."""
    with open(descriptors[0], "rb") as request:  # noqa: PTH123 (a descriptor)
        request.seek(0)
        program = msgspec.json.decode(request.read(), type=Program)
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, ASIDE) for each in descriptors[1:]]
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    for descriptor, place in zip(aside, program.places, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    if program.new_session:
        os.setsid()
    if program.process_group >= 0:
        os.setpgid(0, program.process_group)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.variables)
    sys.argv = program.arguments
    installed = [entry for entry in sys.path if entry not in ON_PATH]
    sys.path[:] = ["", *filter(None, program.variables.get("PYTHONPATH", "").split(":")), *installed, ON_PATH[0]]
    while os.getppid() == parent:
        os.sched_yield()
    module = sys.modules["__main__"] = ModuleType("__main__")
    return compile(program.code, "<string>", "exec"), vars(module)


if __name__ == "__main__":
    exec(*main())  # noqa: S102 (the code of a test)
