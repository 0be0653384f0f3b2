"""From actors on another node to a packed batch: penstock over tcp, and what Ray has for it.

    PYTHONPATH=.venv/ray:. python -m benchmarks.beside_ray [--producers 2] [--groups 8] [--repeats 3]

A cluster of two nodes on this machine: the driver's, and one that is another host to penstock, in a namespace of
processes of its own, so that its records travel by tcp. Producers send prebuilt groups as fast as they may. penstock is
`source(…, on=ray(…))`, a `Batcher` and a sink that counts; the others pack at the least cost in Python. Ray is given as
many calls ahead as penstock has groups in flight, a compiled graph one, because it stopped with more. Processor time is
that of all processes, those of Ray included. Needs root, for the namespace.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import anyio
import msgspec
import numpy as np
import psutil
from rich.console import Console

from penstock import Batcher, ReceiveChannel, SendChannel, TrainBatch, TrajectoryGroup, current, ray, source

from .contestants import leaving_nothing
from .machine import tree_cpu_seconds
from .records import Packing, Plain, batch_tokens, make_groups, plain, trajectory_bytes
from .report import command_line, count, median_of, print_table, write_json

__all__ = ["main"]

TOKENS = 1024
"""Tokens of a trajectory."""

AHEAD = 16
"""Groups of a producer in flight."""

WARM_UP_S = 2.0

SEMAPHORES = Path("/dev/shm")  # noqa: S108 (nothing is made here)

FAR, OTHER_HOST = "far", "other_host"
"""Resources of the two other nodes."""


class Case(NamedTuple):
    """One setting."""

    producers: int
    group: int
    """Trajectories of a group."""
    seconds: float
    address: str
    """Of the cluster."""
    root: int
    """Process that started the cluster, and all others."""


class Rate(NamedTuple):
    """The result of a contestant."""

    trajectories_per_s: float
    cpu_us: float
    """Processor time of a trajectory, in microseconds."""


class Meter:
    """Measures from the first batch after the warm-up on, which begins with the first one of all."""

    def __init__(self, case: Case) -> None:
        self._root = case.root
        self._seconds = case.seconds
        self._begin = float("nan")
        self._first: tuple[float, float, int] | None = None
        self.rate: Rate | None = None

    def look(self, trajectories: int) -> bool:
        """Take in the number of trajectories in batches so far; return whether the measurement is complete."""
        now = time.monotonic()
        if math.isnan(self._begin):
            self._begin = now + WARM_UP_S
        if self._first is None:
            if now >= self._begin:
                self._first = (now, tree_cpu_seconds(self._root), trajectories)
            return False
        began, cpu_s, before = self._first
        if self.rate is None and now >= began + self._seconds:
            got = trajectories - before
            self.rate = Rate(got / (now - began), (tree_cpu_seconds(self._root) - cpu_s) / max(got, 1) * 1e6)
        return self.rate is not None

    def result(self) -> Rate:
        """Return the result.

        Raises:
            RuntimeError: the measurement is not complete.
        """
        if self.rate is None:
            raise RuntimeError("expected records until the end of the measurement, got fewer")
        return self.rate


# -- penstock ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prebuilt:
    """A source of groups at full speed, without end."""

    group: int

    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None:
        """Send prebuilt groups; see `Source`."""
        groups = make_groups(current().worker.index, group=self.group, tokens=TOKENS)
        number = 0
        while True:
            await outbox.send(msgspec.structs.replace(groups[number % len(groups)], instance_id=str(number)))
            number += 1


@dataclass(frozen=True)
class Until:
    """A sink that counts until the measurement is complete."""

    meter: Meter

    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None:
        """Count and commit; see `Sink`."""
        ledger, trajectories = current().ledger, 0
        async for batch in inbox:
            ledger.commit(batch, ledger.step + 1)
            trajectories += len(batch)
            if self.meter.look(trajectories):
                return


def penstock(case: Case) -> Rate:
    """Measure a source in actors on the other node, over tcp."""
    meter = Meter(case)
    on = ray(case.producers, num_cpus=0.1, resources={OTHER_HOST: 0.1}, address=case.address)
    pipeline = (
        source(Prebuilt(case.group), on=on)
        .then(Batcher(max_tokens=batch_tokens(case.group, TOKENS)), capacity=AHEAD)
        .sink(Until(meter))
    )
    report = anyio.run(pipeline.run)
    if (transports := {worker.transport for worker in report.statistics.stages[0].workers}) != {"tcp"}:
        raise RuntimeError(f"expected all actors to send by tcp, got {transports}")
    return meter.result()


# -- Ray ---------------------------------------------------------------------------------------------------------------


class Producer:
    """Returns prebuilt groups."""

    def __init__(self, number: int, group: int) -> None:
        self._groups = [plain(each) for each in make_groups(number, group=group, tokens=TOKENS)]

    def next(self, number: int) -> Plain:
        """Return a group."""
        return self._groups[number % len(self._groups)]._replace(instance_id=str(number))


class Mapped:
    """Makes the rows of Ray Data into groups: arrays by name."""

    def __init__(self, group: int) -> None:
        self._groups = [plain(each) for each in make_groups(0, group=group, tokens=TOKENS)]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a group for each number in `batch`."""
        groups = [self._groups[number % len(self._groups)] for number in batch["id"].tolist()]
        columns = {str(at): np.stack([each.columns[at] for each in groups]) for at in range(len(groups[0].columns))}
        return {"id": batch["id"], "rows": np.stack([each.rows.view(np.uint8) for each in groups]), **columns}


def _packed(case: Case, records: Iterator[Plain]) -> Rate:
    meter, packing, trajectories = Meter(case), Packing(case.group, TOKENS), 0
    for record in records:
        if not packing.fits(record):
            trajectories += len(packing.pack().rows)
            if meter.look(trajectories):
                break
        packing.add(record)
    return meter.result()


def returns(case: Case) -> Rate:
    """Measure results of calls to actors, by the object store."""
    with _connected(case) as itself:
        actors = _actors(itself, case)

        def records() -> Iterator[Plain]:
            calls = deque((actor, actor.next.remote(0)) for _ in range(AHEAD) for actor in actors)
            while True:
                actor, call = calls.popleft()
                calls.append((actor, actor.next.remote(len(calls))))
                yield itself.get(call)

        return _packed(case, records())


def graph(case: Case) -> Rate:
    """Measure a compiled graph, whose channels are reused."""
    with _connected(case) as itself:
        dag: Any = importlib.import_module("ray.dag")
        with dag.InputNode() as inputs:
            outputs = dag.MultiOutputNode([actor.next.bind(inputs) for actor in _actors(itself, case)])
        size = case.group * (trajectory_bytes(TOKENS) + TOKENS) + 2**16
        compiled = outputs.experimental_compile(_buffer_size_bytes=size)

        def records() -> Iterator[Plain]:
            while True:
                yield from itself.get(compiled.execute(0))

        try:
            return _packed(case, records())
        finally:
            compiled.teardown()


def data(case: Case) -> Rate:
    """Measure Ray Data: a map by actors, and its batches."""
    with _connected(case) as itself:
        module: Any = importlib.import_module("ray.data")
        module.DataContext.get_current().enable_progress_bars = False
        mapped = module.range(10_000_000, override_num_blocks=10_000).map_batches(
            Mapped,
            fn_constructor_args=(case.group,),
            batch_size=AHEAD,
            compute=module.ActorPoolStrategy(size=case.producers),
            num_cpus=0.1,
            resources={FAR: 0.1},
        )
        del itself

        def records() -> Iterator[Plain]:
            for batch in mapped.iter_batches(batch_size=AHEAD, prefetch_batches=2):
                for at, number in enumerate(batch["id"].tolist()):
                    rows = batch["rows"][at].view(_ROW)
                    yield Plain("bench", str(number), {}, rows, [batch[str(c)][at] for c in range(_COLUMNS)])

        return _packed(case, records())


_EXAMPLE = plain(make_groups(0, group=1, tokens=1)[0])
_ROW, _COLUMNS = _EXAMPLE.rows.dtype, len(_EXAMPLE.columns)


@contextmanager
def _connected(case: Case) -> Iterator[Any]:
    itself: Any = importlib.import_module("ray")
    itself.init(address=case.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield itself
    finally:
        itself.shutdown()


def _actors(itself: Any, case: Case) -> list[Any]:
    make = itself.remote(num_cpus=0.1, resources={FAR: 0.1})(Producer)
    return [make.remote(number, case.group) for number in range(case.producers)]


# -- the cluster -------------------------------------------------------------------------------------------------------


@contextmanager
def _cluster() -> Iterator[str]:
    """Start a cluster of two nodes; yield its address."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    utils: Any = importlib.import_module("ray.cluster_utils")
    with ExitStack() as stack:
        made = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
        stack.callback(_remove_semaphores, {*SEMAPHORES.glob("sem.*")})
        stack.callback(made.shutdown)
        made.add_node(num_cpus=4, resources={FAR: 1})
        script = "from ray.scripts.scripts import main; main()"
        node = subprocess.Popen(  # noqa: S603 (nothing in it is a user's)
            [
                *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
                *(sys.executable, "-c", script, "start", f"--address={made.address}", "--num-cpus=4", "--block"),
                f'--resources={{"{OTHER_HOST}": 1}}',
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(node.wait)
        stack.callback(node.kill)
        made.wait_for_nodes()
        yield made.address


def _remove_semaphores(others: set[Path]) -> None:
    """Remove the semaphores that compiled graphs left when they stopped; they are named by their processes."""
    for path in {*SEMAPHORES.glob("sem.*")} - others:
        named = re.match(r"sem\.(?:hdr|obj)(\d+)-", path.name)
        if named and not psutil.pid_exists(int(named[1])):
            path.unlink(missing_ok=True)


CONTESTANTS: dict[str, Callable[[Case], Rate]] = {
    "penstock, tcp": penstock,
    "Ray, results of actors": returns,
    "Ray, compiled graph": graph,
    "Ray Data": data,
}


def main() -> None:
    """Measure all contestants in turn, and print a table."""
    parser = command_line(__doc__, seconds=5.0, repeats=3)
    parser.add_argument("--producers", type=count, default=2, help="actors")
    parser.add_argument("--groups", type=count, default=8, help="trajectories of a group")
    arguments = parser.parse_args()
    rates: dict[str, list[Rate]] = {name: [] for name in CONTESTANTS}
    failures: dict[str, str] = {}
    with leaving_nothing(), _cluster() as address:
        _wait_for_node(address)
        case = Case(arguments.producers, arguments.groups, arguments.seconds, address, os.getpid())
        for _ in range(arguments.repeats):
            for name in CONTESTANTS:
                if name in failures:
                    continue
                try:
                    rates[name].append(_in_process(name, case))
                except Exception as error:  # noqa: BLE001 (of Ray: that a contestant fails is a result)
                    failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    console = Console()
    title = f"groups of {arguments.groups} × {TOKENS} tokens, {arguments.producers} actors on another node"
    table = [_row(name, each, rates["penstock, tcp"]) for name, each in rates.items() if each]
    print_table(console, title, ["to a packed batch", "trajectories/s", "CPU µs", "ratio"], table)
    for name, failure in failures.items():
        console.print(f"{name}: {len(rates[name])} measured, then {failure}", highlight=False)
    write_json(arguments.json, {name: [each._asdict() for each in rates[name]] for name in CONTESTANTS})


def _in_process(name: str, case: Case) -> Rate:
    """Measure in a process of its own, which Ray may end with an error."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(CONTESTANTS[name], case).result()


def _row(name: str, rates: list[Rate], ours: list[Rate]) -> list[str]:
    ratio = median(each.trajectories_per_s for each in ours) / median(each.trajectories_per_s for each in rates)
    return [
        name,
        median_of([each.trajectories_per_s for each in rates]),
        median_of([each.cpu_us for each in rates]),
        f"{ratio:.1f}",
    ]


def _wait_for_node(address: str) -> None:
    itself: Any = importlib.import_module("ray")
    itself.init(address=address, log_to_driver=False, logging_level="ERROR")
    while OTHER_HOST not in itself.cluster_resources():
        time.sleep(0.1)
    itself.shutdown()


if __name__ == "__main__":
    from benchmarks import beside_ray  # noqa: PLW0406 (actors import its classes by this name)

    beside_ray.main()
