"""Transports of scored groups of Atropos compared: from lists in an environment to arrays in the trainer's process.

    ATROPOS_PYTHON=/path/to/python python -m benchmarks.atropos

    original          environments as they are → Atropos' own server → a trainer that polls /batch
    gateway, polled   the same environments and the same trainer → `penstock gateway`
    gateway           the same environments → AtroposGateway in the trainer's process
    gateway, kept     clients that keep their connection, and compress nothing → AtroposGateway
    shm               ShmTransport → AtroposGateway

The original is measured where `atroposlib` is installed, for this interpreter or for the one that ATROPOS_PYTHON names,
and skipped otherwise. All work of a client from its lists on is part of the measurement, so that clients and server
compete for the same cores. The processor time of the server is reported separately: that of its process, which in the
last three ways is the trainer's, arrays included.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from penstock import ReceiveChannel, TrajectoryGroup, current, source
from penstock.integrations.atropos import AtroposGateway, ServerConfig

from .atropos_clients import GROUP, Client, Load, as_atropos, by_shm, kept, send
from .contestants import Absent, leaving_nothing
from .contestants.harness import DEADLINE_S, GRACE_S, WARM_UP_S, Control, producing
from .machine import cpu_seconds
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

LOADS = (Load(256), Load(1024), Load(4096), Load(4096, distilled=True))

BATCH = 64
"""Sequences of a batch."""

POLL_S = 0.02
"""Pause of a trainer after a response without a batch."""

CASE_TIMEOUT_S = 2 * DEADLINE_S
"""Bound on a measurement: the original takes a minute for a few groups with distillation."""

START_TIMEOUT_S = 60.0
"""Bound on the start of a server."""

TOKEN_FIELDS: dict[str, Any] = {"tokens": np.int32, "masks": np.int32, "inference_logprobs": np.float32}
DISTILL_FIELDS: dict[str, Any] = {"distill_token_ids": np.int32, "distill_logprobs": np.float32}


@dataclass(frozen=True)
class Outcome:
    """The result of one measurement."""

    trajectories_per_s: float
    server_us: float
    """Processor time that the server took for each trajectory."""
    clients_us: float
    """Processor time that the clients took for each trajectory."""


@dataclass
class Window:
    """The measured time: from one arrival to another, after a warm-up."""

    seconds: float
    control: Control
    cpu: Callable[[], tuple[float, float]]
    """Returns seconds of processor time so far: the server's, the clients'."""
    clock: Callable[[], float] = time.perf_counter
    outcome: Outcome | None = None
    _warm_at: float | None = None
    _begin: tuple[float, float, float] | None = None
    _arrived: int = 0

    def arrived(self, trajectories: int) -> bool:
        """Count trajectories that are arrays now; return whether the measurement is complete."""
        if self.outcome is not None:
            return True
        now = self.clock()
        if self._warm_at is None:
            self._warm_at = now + WARM_UP_S
        elif self._begin is None:
            self._begin = (now, *self.cpu()) if now >= self._warm_at else None
        else:
            self._arrived += trajectories
            if now - self._begin[0] >= self.seconds:
                self.outcome = self._between(self._begin, (now, *self.cpu()))
                self.control.stop()
        return self.outcome is not None

    def _between(self, first: tuple[float, float, float], last: tuple[float, float, float]) -> Outcome:
        took, server, clients = (after - before for before, after in zip(first, last, strict=True))
        return Outcome(self._arrived / took, server / self._arrived * 1e6, clients / self._arrived * 1e6)


def _cpu(server: Sequence[int], clients: Sequence[int]) -> tuple[float, float]:
    return cpu_seconds(server), cpu_seconds(clients)


@dataclass(frozen=True)
class Case:
    """One setting of the measurement."""

    load: Load
    clients: int
    """Number of client processes."""
    seconds: float


Run: TypeAlias = Callable[[Case], Outcome]


# -- a pipeline that environments send to ----------------------------------------------------------------------------


@dataclass
class Arrivals:
    """A sink that counts trajectories until the measurement is complete."""

    window: Window
    load: Load
    done: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, inbox: ReceiveChannel[TrajectoryGroup]) -> None:
        """Count until the measurement is complete; see `Sink`."""
        ledger = current().ledger
        async for group in inbox:
            _check(len(group), len(group.tokens), self.load)
            ledger.end(group, "trained")
            if self.window.arrived(len(group)):
                self.done.set()
            del group


def _piped(client: Client, case: Case) -> Outcome:
    return anyio.run(_pipe, client, case)


async def _pipe(client: Client, case: Case) -> Outcome:
    gateway = AtroposGateway(batch_size=BATCH, max_token_len=case.load.tokens + 1, server=ServerConfig(port=0))
    control, clients = Control(case.clients), list[int]()
    window = Window(case.seconds, control, partial(_cpu, [os.getpid()], clients))
    arrivals = Arrivals(window, case.load)
    with anyio.fail_after(CASE_TIMEOUT_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(source(gateway).sink(arrivals).run)
            url = await gateway.listening.url()
            with producing(send, _clients(client, url, case, control)) as processes:
                clients += [process.pid or 0 for process in processes]
                await arrivals.done.wait()
                for process in processes:  # before the gateway closes, so that clients can close their connections
                    await anyio.to_thread.run_sync(process.join, GRACE_S)
            tasks.cancel_scope.cancel()
    return _done(window)


def _clients(client: Client, url: str, case: Case, control: Control) -> list[tuple[Any, ...]]:
    return [(client, url, case.load, number, control) for number in range(case.clients)]


def _done(window: Window) -> Outcome:
    assert window.outcome is not None  # noqa: S101 (the caller waited for it)
    return window.outcome


def _check(sequences: int, tokens: int, load: Load) -> None:
    if (sequences, tokens) != (GROUP, GROUP * load.tokens):
        raise AssertionError(f"expected {load}, got {sequences} sequences of {tokens} tokens in all")


# -- a server that environments send to, and that a trainer polls ----------------------------------------------------


def _polled(command: Sequence[str], case: Case) -> Outcome:
    with _server(command) as (url, pid):
        registered = _request(url, "POST", "/register", _registration(case.load))
        if "uuid" not in registered:
            raise RuntimeError(f"expected to be registered, got {registered}")
        control, clients = Control(case.clients), list[int]()
        window, deadline = (
            Window(case.seconds, control, partial(_cpu, [pid], clients)),
            time.monotonic() + CASE_TIMEOUT_S,
        )
        _request(url, "GET", "/batch")
        with producing(send, _clients(as_atropos, url, case, control)) as processes:
            clients += [process.pid or 0 for process in processes]
            while window.outcome is None:
                groups = _request(url, "GET", "/batch")["batch"] or []
                arrays = [_arrays(group) for group in groups]
                for tokens in arrays:
                    _check(len(tokens), tokens.size, case.load)
                if arrays:
                    window.arrived(sum(map(len, arrays)))
                elif time.monotonic() > deadline:
                    raise TimeoutError(f"expected a measurement within {CASE_TIMEOUT_S:.0f} s")
                else:
                    time.sleep(POLL_S)
    return _done(window)


def _registration(load: Load) -> dict[str, Any]:
    return {
        "wandb_group": "bench",
        "wandb_project": "bench",
        "batch_size": BATCH,
        "max_token_len": load.tokens + 1,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 2**31 - 1,
    }


def _request(url: str, method: str, path: str, content: Any = None) -> Any:
    """Return the response to one request, on a new connection, as trainers do."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=CASE_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
        connection.request(method, path, None if content is None else json.dumps(content), headers)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RuntimeError(f"{method} {path}: {response.status} {body[:200]!r}")
    return json.loads(gzip.decompress(body) if response.headers.get("Content-Encoding") == "gzip" else body)


def _arrays(group: dict[str, Any]) -> NDArray[np.int32]:
    """Return the tokens as an array, after converting the other lists too."""
    columns = {name: np.array(group[name], dtype) for name, dtype in TOKEN_FIELDS.items()}
    for name, dtype in DISTILL_FIELDS.items():
        for row in group[name] or ():
            np.array([value for candidates in row for value in candidates], dtype)
    return columns["tokens"]


@contextmanager
def _server(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Start a server; yield its URL and process id once it responds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [*command, "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603 (ours)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
    try:
        while not _responds(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(arguments)} did not respond")
            time.sleep(POLL_S)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # it may be busy with a batch
            process.kill()
            process.wait()


def _responds(url: str) -> bool:
    try:
        _request(url, "GET", "/")
    except OSError:
        return False
    return True


def _original(case: Case) -> Outcome:
    python = Path(os.environ.get("ATROPOS_PYTHON") or sys.executable)
    command = python.with_name("run-api")
    if not command.exists():
        raise Absent("pip install atroposlib, or set ATROPOS_PYTHON to an interpreter that has it")
    return _polled([str(command)], case)


def _gateway_polled(case: Case) -> Outcome:
    return _polled([str(Path(sys.executable).with_name("penstock")), "gateway"], case)


WAYS: dict[str, Run] = {
    "original": _original,
    "gateway, polled": _gateway_polled,
    "gateway": lambda case: _piped(as_atropos, case),
    "gateway, kept": lambda case: _piped(kept, case),
    "shm": lambda case: _piped(by_shm, case),
}


# -- all of it -------------------------------------------------------------------------------------------------------


def measure(
    case: Case, ways: Sequence[str], repeats: int, console: Console
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Measure every way in turn, `repeats` times; return a row for each, and the reasons of skipped ones."""
    outcomes: dict[str, list[Outcome]] = {}
    skipped: dict[str, str] = {}
    for repeat in range(repeats):
        for way in ways:
            if way in skipped:
                continue
            with console.status(f"{case.load}: {way}, {repeat + 1} of {repeats}"):
                try:
                    outcome = WAYS[way](case)
                except Absent as absent:
                    skipped[way] = f"skipped: {absent}"
                except Exception as error:  # noqa: BLE001 (a failure must not stop the other measurements)
                    skipped[way] = f"failed with {case.load}: {type(error).__name__}: {error}"
                else:
                    outcomes.setdefault(way, []).append(outcome)
    return [_row(case.load, way, each, outcomes.get("original")) for way, each in outcomes.items()], skipped


def _row(load: Load, way: str, outcomes: list[Outcome], original: list[Outcome] | None) -> dict[str, Any]:
    rates = [outcome.trajectories_per_s for outcome in outcomes]
    row: dict[str, Any] = {
        "way": way,
        "tokens": load.tokens,
        "distilled": load.distilled,
        "trajectories_per_s": rates,
        "server_us": [outcome.server_us for outcome in outcomes],
        "clients_us": [outcome.clients_us for outcome in outcomes],
    }
    if original is not None:
        pairs = list(zip(outcomes, original, strict=False))
        row["ratio"] = [ours.trajectories_per_s / theirs.trajectories_per_s for ours, theirs in pairs]
        row["server_share"] = [ours.server_us / theirs.server_us for ours, theirs in pairs]
    return row


def _show(case: Case, rows: list[dict[str, Any]], skipped: dict[str, str], console: Console) -> None:
    head = ("way", "trajectories/s", "ratio", "server µs", "share", "clients µs")
    print_table(console, f"{case.clients} clients, groups of {case.load}", head, map(_cells, rows))
    for way, reason in skipped.items():
        console.print(f"{way} {reason}", style="dim", highlight=False, markup=False)


def _cells(row: dict[str, Any]) -> list[str]:
    ratio = f"{statistics.median(row['ratio']):.1f}" if "ratio" in row else "–"
    share = f"{statistics.median(row['server_share']):.2f}" if "ratio" in row else "–"
    server, clients = (f"{statistics.median(row[name]):,.0f}" for name in ("server_us", "clients_us"))
    return [row["way"], median_of(row["trajectories_per_s"]), ratio, server, share, clients]


@leaving_nothing()
def main() -> None:
    """Parse the command line and run."""
    parser = command_line(__doc__, seconds=3.0, repeats=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--clients", type=count, default=2, help="client processes")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        choices=sorted({load.tokens for load in LOADS}),
        help="only loads with so many tokens in a trajectory",
    )
    arguments, console = parser.parse_args(), Console()
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for load in LOADS:
        if arguments.tokens and load.tokens not in arguments.tokens:
            continue
        case = Case(load, arguments.clients, arguments.seconds)
        measured, absent = measure(case, arguments.ways, arguments.repeats, console)
        _show(case, measured, absent, console)
        rows, skipped = rows + measured, skipped | absent
    write_json(arguments.json, {"rows": rows, "skipped": skipped})


if __name__ == "__main__":
    main()
