"""Ray: results of actors, ray.util.queue, and a compiled graph. The driver consumes, actors produce."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ..records import Plain, trajectory_bytes
from .harness import DEADLINE_S, IDLE_S, IN_FLIGHT, Case, Control, Outcome, need, race, records_to_send

__all__ = ["ray_actor", "ray_graph", "ray_queue"]

ROOT = Path(__file__).parent.parent.parent

AHEAD = 4
"""Calls to an actor in flight."""

PING_INTERVAL_S = 0.005


def ray_actor(case: Case) -> Outcome:
    """Receive each record as the result of a call to an actor."""
    return race(_slower(case), partial(_serve, taken=_returned), None)


def ray_graph(case: Case) -> Outcome:
    """Make the same calls in a compiled graph, whose channels are reused."""
    return race(_slower(case), partial(_serve, taken=_of_graph), None)


def ray_queue(case: Case) -> Outcome:
    """Send records from actors through a `ray.util.queue`."""
    return race(_slower(case), partial(_serve, taken=_queued), None)


def _slower(case: Case) -> Case:
    """Return the case with a longer interval where one record is in flight at a time."""
    return replace(case, interval_s=PING_INTERVAL_S) if case.one_at_a_time else case


_Taken: TypeAlias = Callable[[Any, list[Any], Case, Control, str], Iterator[Plain | None]]


@contextmanager
def _serve(case: Case, control: Control, *, taken: _Taken) -> Iterator[tuple[Any, Iterator[Plain | None]]]:
    ray = need("ray", "ray")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of its sockets must be short
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        num_cpus=case.producers + 2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=max(256 * 2**20, 4 * IN_FLIGHT * case.producers * _nbytes(case)),
        runtime_env={"env_vars": {"PYTHONPATH": path}},
        _temp_dir=directory,
    )
    try:
        actors = [ray.remote(_Producer).remote(case, number, directory) for number in range(case.producers)]
        yield None, taken(ray, actors, case, control, directory)
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _nbytes(case: Case) -> int:
    return case.group * (trajectory_bytes(case.tokens) + case.tokens) + 4096


class _FileControl(Control):
    """Stops producers by a file, because processes of Ray inherit no shared state."""

    def __init__(self, producers: int, directory: str) -> None:
        super().__init__(producers)
        self._path = Path(directory) / "stop"

    @property
    def stopping(self) -> bool:
        """Return whether the file exists."""
        return self._path.exists()

    def stop(self) -> None:
        """Create the file."""
        self._path.touch()

    @property
    def taken(self) -> int:
        """Return a large number: a record is requested after the previous one was received."""
        return 2**63 - 1


class _Producer:
    """The actor of a producer."""

    def __init__(self, case: Case, number: int, directory: str) -> None:
        self._number = number
        self._control = _FileControl(case.producers, directory)
        self._records = records_to_send(case, number, self._control)

    def next(self, _: int) -> Plain:
        return next(self._records)

    def flood(self, queue: Any) -> int:
        """Put records until stopped; return their number."""
        for record in self._records:
            queue.put(record)
        return self._control.sent[self._number]


def _returned(ray: Any, actors: list[Any], case: Case, control: Control, _: str) -> Iterator[Plain | None]:
    ahead = 1 if case.one_at_a_time else AHEAD
    waiting = [deque(actor.next.remote(0) for _ in range(ahead)) for actor in actors]
    called = ahead
    while waiting[0]:
        for calls in waiting:
            yield ray.get(calls.popleft(), timeout=DEADLINE_S)
        if not control.stopping:
            called += 1
            for actor, calls in zip(actors, waiting, strict=True):
                calls.append(actor.next.remote(0))
    for number in range(len(actors)):
        control.report(number, called)


def _of_graph(ray: Any, actors: list[Any], case: Case, control: Control, _: str) -> Iterator[Plain | None]:
    dag = need("ray.dag", "ray")
    with dag.InputNode() as inputs:
        outputs = dag.MultiOutputNode([actor.next.bind(inputs) for actor in actors])
    graph = outputs.experimental_compile(_buffer_size_bytes=_nbytes(case) + 2**16)
    ahead = 1 if case.one_at_a_time else AHEAD
    waiting = deque(graph.execute(0) for _ in range(ahead))
    called = ahead
    while waiting:
        yield from ray.get(waiting.popleft(), timeout=DEADLINE_S)
        if not control.stopping:
            called += 1
            waiting.append(graph.execute(0))
    for number in range(len(actors)):
        control.report(number, called)
    graph.teardown()


def _queued(ray: Any, actors: list[Any], case: Case, control: Control, directory: str) -> Iterator[Plain | None]:
    module = need("ray.util.queue", "ray")
    queue = module.Queue(1 if case.one_at_a_time else IN_FLIGHT * case.producers)
    floods = [actor.flood.remote(queue) for actor in actors]
    stop = _FileControl(case.producers, directory)
    ended = False
    while True:
        try:
            yield queue.get(timeout=IDLE_S)
        except module.Empty:
            if ended:
                break
            yield None
        if control.stopping and not stop.stopping:
            stop.stop()
        ended = control.stopping and len(ray.wait(floods, num_returns=len(floods), timeout=0)[0]) == len(floods)
    for number, sent in enumerate(ray.get(floods, timeout=DEADLINE_S)):
        control.report(number, sent)
    queue.shutdown()
