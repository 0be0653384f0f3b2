"""Start Python as a fork of a process that has imported what the program needs: most of the work of its start.

A fork begins as a new process does, for the forking process has neither a thread nor an event loop. It becomes a child
of the process that asks for it, with the command, descriptors, variables and folder that `subprocess.Popen` was given.
A nested fork has a copy of the forking process, its first child, and asks that for forks in its turn. A fork that is a
subreaper becomes, where it would execute an interpreter, what that would be.
`python -m tests.forks` is the forking process, `Forks` the interface to it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import msgspec

__all__ = ["Forks", "forking", "own_forks"]

EXECUTABLE = sys.executable

EXECUTE_CHILD = vars(subprocess.Popen)["_execute_child"]
"""Starts a process for `subprocess.Popen`."""

_own: list[Forks] = []
"""In a nested fork: the interface to its copy of the forking process."""

ROOT = Path(__file__).parents[1]

ON_PATH = [str(ROOT / "src"), str(ROOT)]

MODULES = ["penstock._cli.app", "penstock._pipeline.workers.worker"]
"""Imported by every forking process."""

READ_BY_IMPORTS = ("HF_", "OMP_", "PYTHON", "TRANSFORMERS_")
"""Variables that begin so have had their effect when a fork begins."""

IGNORED = ("-u", "-I", "-S")
"""Flags of an interpreter that a fork runs as well with; `-I -S` are those of the subreaper, which imports nothing."""

PR_SET_CHILD_SUBREAPER = 36

ASIDE = 500
"""Descriptors from here on are free while those of a fork are put at their places."""

COMMAND_BYTES = 20_000
"""Room for the command of a fork, as /proc shows it."""


class Program(msgspec.Struct, frozen=True):
    """What a fork runs."""

    arguments: list[str]
    """Those of the interpreter: `-c` and code, `-m` and a module, or a script; then those of the program."""
    folder: str
    variables: dict[str, str]
    places: list[int]
    """Those of the descriptors that come with the request, in their order."""
    process_group: int
    new_session: bool
    nested: bool
    """Whether the fork asks for forks in its turn."""


class Forks:
    """The interface to a forking process, which ends when the socket of its requests is closed."""

    def __init__(self, connect: Callable[[], socket.socket], *, nested: bool) -> None:
        self._connect = connect
        self._nested = nested
        self._lock = threading.Lock()
        self._variables = dict(os.environ)

    @cached_property
    def requests(self) -> socket.socket:
        """The socket of the forking process, which begins with the first fork, or when this is read."""
        return self._connect()

    def start(self, program: Program, descriptors: list[int]) -> int:
        """Return the id of a new child of this process."""
        with open(os.memfd_create("program"), "wb", buffering=0) as request:  # noqa: PTH123 (a descriptor)
            request.write(msgspec.json.encode(program))
            with self._lock:
                requests = self.requests
                _adopt_orphans(True)
                try:
                    socket.send_fds(requests, [b"fork"], [request.fileno(), *descriptors])
                    return int(requests.recv(100))
                finally:
                    _adopt_orphans(False)

    @contextmanager
    def in_place_of_interpreters(self) -> Iterator[None]:
        """Fork within the body where `subprocess.Popen` would start an interpreter, unless that is traced."""
        started = self.replace_interpreters()
        try:
            yield
        finally:
            setattr(subprocess.Popen, "_execute_child", started)  # noqa: B010 (private)

    def replace_interpreters(self) -> Callable[..., None]:
        """Fork from now on where `subprocess.Popen` would start an interpreter; return what `Popen` started with."""
        started: Callable[..., None] = vars(subprocess.Popen)["_execute_child"]

        def forked(popen: Any, args: Any, executable: Any, preexec_fn: Any, *others: Any) -> None:
            _, pass_fds, folder, variables, _, _, shell, *pipes, _, gid, gids, uid, _, new_session, group = others
            as_another = shell or any(each is not None for each in (preexec_fn, gid, gids, uid))
            variables = dict(os.environ if variables is None else variables)
            if as_another or not _is_python(args) or not self._imports_as_with(variables):
                started(popen, args, executable, preexec_fn, *others)
                return
            standard = {place: place if pipe < 0 else pipe for place, pipe in enumerate((pipes[0], pipes[3], pipes[5]))}
            descriptors = standard | {number: number for number in pass_fds}
            program = Program(
                arguments=[*map(os.fsdecode, args[1:])],
                folder=os.path.join(f"/proc/{os.getpid()}/cwd", os.fsdecode(folder or "")),  # noqa: PTH118 (a string is wanted)
                variables=variables,
                places=list(descriptors),
                process_group=group,
                new_session=bool(new_session),
                nested=self._nested,
            )
            popen.pid = self.start(program, list(descriptors.values()))
            popen._child_created = True
            popen._close_pipe_fds(*pipes)

        setattr(subprocess.Popen, "_execute_child", forked)  # noqa: B010 (private)
        return started

    def _imports_as_with(self, variables: dict[str, str]) -> bool:
        """Return whether an interpreter with these variables would import as the forking process did, untraced."""
        changed = {name for name, _ in variables.items() - self._variables.items()} - {"PYTHONPATH"}
        paths = set(variables.get("PYTHONPATH", "").split(":")) - {*ON_PATH}
        if any((Path(folder) / "penstock").exists() for folder in paths):
            return False  # another penstock, as of a wheel
        return "COVERAGE_PROCESS_CONFIG" not in variables and not any(map(_is_read_by_imports, changed))


@contextmanager
def forking(*modules: str, nested: bool = False) -> Iterator[Forks]:
    """Have a process within the body, from its first fork on, that imports `modules` besides penstock."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    variables |= {"PYTHONPATH": ":".join(ON_PATH)}
    with ExitStack() as stack:
        yield Forks(lambda: stack.enter_context(_forking_process(modules, variables)), nested=nested)


@contextmanager
def _forking_process(modules: Iterable[str], variables: dict[str, str]) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.forks", *MODULES, *modules, " " * COMMAND_BYTES]
    with subprocess.Popen(command, stdin=theirs.fileno(), env=variables, cwd=ROOT), ours:
        theirs.close()
        yield ours


def own_forks() -> Forks | None:
    """Return the interface to the copy of the forking process that this nested fork has; None in another process.

    From now on the copy forks in place of interpreters where it is asked to, and not everywhere.
    """
    setattr(subprocess.Popen, "_execute_child", EXECUTE_CHILD)  # noqa: B010 (private)
    return _own[0] if _own else None


def _is_python(command: Any) -> bool:
    """Return whether this interpreter shall run code, a module or a script, with no flag that a fork cannot obey."""
    if not isinstance(command, list | tuple) or str(command[0]) != EXECUTABLE or "tests.forks" in command:
        return False
    program = next((str(each) for each in command[1:] if each not in IGNORED), "")
    return program in {"-c", "-m"} or program.endswith(".py")


def _is_read_by_imports(variable: str) -> bool:
    return variable.startswith(READ_BY_IMPORTS)


def _adopt_orphans(adopts: bool) -> None:  # noqa: FBT001 (as the kernel has it)
    """Have a process whose parent ends become a child of this one, if it descends from it; or no more."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


# -- the forking process -----------------------------------------------------------------------------------------------


def main() -> Callable[[], object]:
    """Import, and fork for every request; return in each fork what it runs."""
    for module in sys.argv[1:-1]:
        importlib.import_module(module)
    sys.modules["tests.forks"] = sys.modules["__main__"]  # one module in its forks, which import it by its name
    requests = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:  # noqa: PTH123 (a device)
        os.dup2(null.fileno(), 0)
    for finalizer in vars(weakref.finalize)["_registry"]:
        finalizer.atexit = False  # what was imported is not taken apart at the end of a fork
    gc.collect()
    gc.freeze()
    return _serve(requests)


def _serve(requests: socket.socket) -> Callable[[], object]:
    """Fork for every request, and return in each fork what it runs; exit when there are no more requests."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the forks of this process group
    while True:
        _, descriptors, _, _ = socket.recv_fds(requests, 10, 100)
        if not descriptors:
            os._exit(0)
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


def _begun(descriptors: list[int], parent: int) -> Callable[[], object]:
    """Make this fork what `Popen` makes of a new process, and return what it runs."""
    with open(descriptors.pop(0), "rb") as request:  # noqa: PTH123 (a descriptor)
        request.seek(0)
        program = msgspec.json.decode(request.read(), type=Program)
    while os.getppid() == parent:
        os.sched_yield()
    if program.new_session:
        os.setsid()
    if program.process_group >= 0:
        os.setpgid(0, program.process_group)
    requests = None
    if program.nested:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (copy := os.fork()):
            for descriptor in (ours.detach(), *descriptors):
                os.close(descriptor)
            return _serve(theirs)
        theirs.close()
        requests = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, ASIDE))
        ours.close()
        atexit.register(_end, requests, copy, os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _place(descriptors, program.places)
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.variables)
    _show_command([sys.executable, *program.arguments])
    if requests is not None:
        _own[:] = [Forks(lambda: requests, nested=True)]
        _own[0].replace_interpreters()
    if "-I" in program.arguments:
        setattr(os, "execvp", _executing(os.execvp))  # noqa: B010 (of another type)
    installed = [entry for entry in sys.path if entry not in ON_PATH]
    sys.path[:] = ["", *filter(None, program.variables.get("PYTHONPATH", "").split(":")), *installed, ON_PATH[0]]
    return _as_main(program.arguments)


def _executing(execvp: Callable[..., NoReturn]) -> Callable[[str, list[str]], NoReturn]:
    """Return what runs an interpreter's program in this process in its place, and executes all others."""

    def become(file: str, command: list[str]) -> NoReturn:
        if not _is_python(command):
            execvp(file, command)
        setattr(os, "execvp", execvp)  # noqa: B010 (as above)
        setattr(subprocess.Popen, "_execute_child", EXECUTE_CHILD)  # noqa: B010 (the copy is the subreaper's)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (numbers)
            with contextlib.suppress(OSError):
                if not os.get_inheritable(descriptor):
                    os.close(descriptor)
        _show_command(command)
        try:
            _run(_as_main(command[1:]))
        except SystemExit as exit_:
            sys.stderr.write(f"{exit_.code}\n")
        except BaseException:  # noqa: BLE001 (as an interpreter does)
            traceback.print_exc()
        os._exit(1)

    return become


def _end(requests: socket.socket, copy: int, pid: int) -> None:
    """Wait for the copy of the forking process, in the fork itself and in none that it makes by `os.fork`."""
    if os.getpid() == pid:
        requests.close()
        with contextlib.suppress(ChildProcessError):  # a subreaper reaps all
            os.waitpid(copy, 0)


def _place(descriptors: list[int], places: list[int]) -> None:
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, ASIDE) for each in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, place in zip(aside, places, strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)


def _show_command(command: list[str]) -> None:
    """Have /proc show `command`, where there was the command of the forking process with its room."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))


def _as_main(arguments: list[str]) -> Callable[[], object]:
    """Return what runs the program that `arguments` of the interpreter name, as the interpreter would."""
    while arguments[0] in IGNORED:
        if arguments.pop(0) == "-u":
            vars(sys)["stdout"].reconfigure(line_buffering=True)
    main = sys.modules["__main__"] = ModuleType("__main__")
    kind = arguments[0]
    named = arguments.pop(1) if kind in {"-c", "-m"} else ""
    sys.argv = arguments
    if kind == "-m":
        sys.path[0] = os.getcwd()  # noqa: PTH109 (a string is wanted)
        return partial(vars(runpy)["_run_module_as_main"], named)
    if kind == "-c":
        return partial(exec, compile(named, "<string>", "exec"), vars(main))
    sys.path[0] = str(Path(kind).resolve().parent)
    vars(main)["__file__"] = kind
    return partial(exec, compile(Path(kind).read_bytes(), kind, "exec"), vars(main))


def _run(program: Callable[[], object]) -> None:
    """Run a program that ends as an interpreter does, except that what was imported is not taken apart.

    That would take half a second with torch, whose pages it copies. A program that fails is left to the interpreter.
    """
    try:
        program()
        status = 0
    except SystemExit as exit_:
        if not isinstance(exit_.code, int | None):
            raise
        status = exit_.code or 0
    vars(threading)["_shutdown"]()  # waits for threads
    vars(atexit)["_run_exitfuncs"]()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _run(main())
