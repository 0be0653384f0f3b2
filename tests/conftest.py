"""Rules for every test: nothing blocks the event loop, processes leave nothing, a test that hangs prints its waits."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import time
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import structlog
import zmq
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings
from tests.failsafe import FAILSAFE_S
from tests.forks import Forks, forking, own_forks
from tests.installation import Installed, build_distributions, install_editable
from tests.processes.children import children_of
from tests.watchdog import pytest_timeout_set_timer as pytest_timeout_set_timer  # noqa: PLC0414 (a hook)

from penstock._pipeline.channels.zmq_context import zmq_context

REAPING_S = FAILSAFE_S
"""Bound on the closing of a socket by a thread of ZeroMQ, and on the end of a thread of penstock."""

OWN_S = 1.0
"""Seconds after which everything is collected, and not only what a test has made, if something is left."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Torch, also in processes that tests start, has one thread: a second one spins beside other tests, and gains nothing
with tensors as small as theirs."""


def _hear_signals() -> None:
    """Handle the signals that a process ignores which a shell started in the background, or `nohup`.

    What a test starts inherits what is ignored. A handler in Python is not inherited: the tests themselves go on after
    SIGHUP, as `nohup` wants it. So do the processes that they are divided among, which end with the one that divides.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or OWN_FORKS is not None:
        signal.signal(signal.SIGHUP, lambda *_: None)


OWN_FORKS = own_forks()
"""The forking process with torch of a process that is one of several for the tests, see `pytest_sessionstart`."""

_hear_signals()

STARTED = {"test_machine_limits.py", "typing", "test_conftest.py", "test_names.py", "test_packaging.py"}
"""Folders, and files, whose tests start interpreters as Python does: they are about the start, or bound the memory."""

FORKED_WITH_TORCH = {
    "examples",
    "models_hf",
    "ranks",
    "resumption",
    "test_architecture.py",
    "test_seeded_prompts.py",
}
"""Folders, and files, whose tests start interpreters with a model, which start such interpreters in their turn."""

TRAINING = ("torch._dynamo", "transformers.models.auto.modeling_auto")
"""Imported by what trains a model."""

gc.disable()  # what collects the tests makes nothing but what stays: 40 % of its time were collections, see below

settings.register_profile("search", database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True)
settings.load_profile("same")
"""The same examples every time, however slow the machine is; `pytest --hypothesis-profile=search` looks for others."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Fork the processes that the tests are divided among: torch is imported once, and not in each and its forks."""
    if not session.config.getoption("numprocesses", None):
        return (yield)
    with forking(*TRAINING, nested=True) as forks, forks.in_place_of_interpreters():
        return (yield)


def pytest_collection_finish() -> None:
    """Have no collection go through the tests and the modules, which stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _nothing_blocks_the_event_loop() -> Iterator[None]:
    """Raise BlockingError for any blocking call (sleep, file, socket, lock) from penstock's code under a running loop.

    An import may block, the first time. So may a line of metrics, once a step: it goes to the kernel's cache.
    """
    with blockbuster_ctx("penstock") as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
            function.can_block_in("penstock/_pipeline/accounting/telemetry.py", "__call__")
            function.can_block_in(
                "penstock/_pipeline/util/installation.py", "install_command"
            )  # of an extra, at the end
            function.can_block_in("tests/forks.py", {"start", "_imports_as_with"})  # as `subprocess.Popen` does
            function.can_block_in("coverage/collector.py", "lock_data")  # the first time that a file is traced
        yield


@pytest.fixture(autouse=True, scope="session")
def _the_key_of_this_user_is_not_touched(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have channels on loopback, those of child processes too, use a key that is made for this run of the tests."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(autouse=True)
def _logging_is_as_a_script_finds_it() -> Iterator[None]:
    """Reset structlog, which counts as configured after `capture_logs`, so that caplog would receive nothing."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Start the process that forks in place of interpreters."""
    with forking() as forks:
        yield forks


@pytest.fixture(scope="session")
def forks_with_torch() -> Iterator[Forks]:
    """Start one that has imported what trains a model, and whose forks start forks too."""
    if OWN_FORKS is not None:
        yield OWN_FORKS
        return
    with forking(*TRAINING, nested=True) as forks:
        yield forks


@pytest.fixture(autouse=True, scope="module")
def _interpreters_are_forks(request: pytest.FixtureRequest, forks: Forks, forks_with_torch: Forks) -> Iterator[None]:
    """Fork in place of interpreters, whose start would be most of a test's time."""
    parts = set(request.path.parts)
    if parts & STARTED or request.path.name.startswith("against_"):
        yield
        return
    with (forks_with_torch if parts & FORKED_WITH_TORCH else forks).in_place_of_interpreters():
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest, forks: Forks) -> Iterator[None]:
    """Assert that a test under tests/processes leaves no child, no descriptor and no file in /dev/shm."""
    if "processes" not in request.path.parts:
        yield
        return
    for context in (zmq_context(), zmq.Context.instance()):  # penstock's stays, and so does the one that tests use
        context.socket(zmq.PAIR).close()
    assert forks.requests  # the process that forks stays
    zmq.Frame(b"\0", copy=False)  # nor is that of the thread with which pyzmq frees what was sent without a copy
    before = _holdings()
    gc.collect(1)
    gc.freeze()  # a collection at the end goes through what the test has made, and not through 8,000 other tests
    yield
    left = _left_beyond(before)
    assert not left, f"expected the test to leave nothing behind, it left {sorted(left)}"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist of a copy of this checkout, and the wheel that was built from it."""
    return _made_once(tmp_path_factory, "built", build_distributions)


@pytest.fixture(scope="session")
def wheel(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the content of the wheel, as pip unpacks it."""

    def unpack(folder: Path) -> None:
        with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
            archive.extractall(folder)

    return _made_once(tmp_path_factory, "wheel", unpack)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Return an editable installation of a copy of this checkout."""
    return Installed(_made_once(tmp_path_factory, "installed", install_editable))


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that the first process of these tests makes, for all of them."""
    folder = tmp_path_factory.getbasetemp() / name
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent.parent / name
    with folder.with_suffix(".made").open("a+") as made:
        fcntl.flock(made, fcntl.LOCK_EX)
        if not os.fstat(made.fileno()).st_size:  # as it is under the lock, and not as it was when it was opened
            folder.mkdir()
            make(folder)
            made.write("made")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread of torch: small models are slower on two, above all beside other work."""
    import torch  # noqa: PLC0415 (most tests need none)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def _most_processes_run_as_for_their_users(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that tests start are traced for coverage in some places alone: it costs them half of their speed, and
    what the others run is run there too."""
    with pytest.MonkeyPatch.context() as environment:
        if not {"test_workers.py", "ranks", "atropos"} & set(request.path.parts):
            environment.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
        yield


def _left_beyond(before: set[str]) -> set[str]:
    """Return the resources beyond `before`, after threads have had time to close sockets of ZeroMQ, and to end.

    A thread that is about to end may hold the last reference to a cycle: what it leaves is collected each time. Cycles
    with objects that are older than the test are collected when that has not been enough.
    """
    began = time.monotonic()
    gc.collect()
    while (left := _holdings() - before) and time.monotonic() < began + REAPING_S:
        time.sleep(0.01)
        if time.monotonic() > began + OWN_S:
            gc.unfreeze()
        gc.collect()
    return left


def _holdings() -> set[str]:
    """Return the resources that this process holds, in words."""
    return _children() | _descriptors() | _named_memory()


def _children() -> set[str]:
    """Return the child processes of this one, zombies included."""
    return {f"child process {pid}" for pid in children_of(os.getpid())}


def _descriptors() -> set[str]:
    """Open descriptors, except the one that lists them."""
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"descriptor {link.name} of {link.readlink()}")
    return found


def _named_memory() -> set[str]:
    """Return the files of penstock in /dev/shm."""
    return {str(path) for path in Path("/dev/shm").glob("*penstock*")}  # noqa: S108 (looked at, not written)
