"""Workers in actors of Ray; the parent's side.

Ray places an actor, starts its process, and reports its end: the return of its one call, or its death and that of its
node. Events between these arrive with its records (`Supervisor.handle`).
"""

from __future__ import annotations

import asyncio
import os
from importlib import import_module
from typing import Any, Self

import anyio

from ..accounting.telemetry import get_logger
from ..graph.placement import Ray
from .ray_cluster import Reservation, import_ray, in_thread
from .ray_head import RayHead
from .worker_messages import Failed, StageConfig
from .worker_progress import WorkerProgress

log = get_logger("penstock.pipeline")

NODE_DIED = "its node has died"
"""Part of Ray's message where a node's death is that of an actor; the exception has no field for it."""

KILL_S = 30.0
"""Seconds that Ray may take to report the end of an actor that was killed."""


class RayWorker:
    """One actor, until Ray has reported its end; a `WorkerHandle`."""

    def __init__(self, config: StageConfig, actor: Any, place: Any, result: Any, *, head: RayHead) -> None:
        self.config = config
        self.progress = WorkerProgress(config)
        self.phase: str = "waiting for its place on a node, and the start of its process"
        """The phase of its start, for messages."""
        self._head = head
        self._actor = actor
        self._place = asyncio.wrap_future(place.future())
        self._result = asyncio.wrap_future(result.future())
        self._killed_because = ""
        """The reason why it was killed and must be replaced."""
        self._death = "ended"
        """The cause of its death, as Ray gives it."""
        self.misplaced: bool = False
        """True if it never ran, because its node had died."""

    @property
    def running(self) -> bool:
        """Return whether Ray has not reported its end."""
        return not self._result.done()

    async def exited(self) -> None:
        """Wait until Ray reports its end, and take in the cause."""
        await asyncio.wait([self._result])
        if (error := self._result.exception()) is not None:
            self._take_in(error)

    def _take_in(self, error: BaseException) -> None:
        """Take in the reason why its call did not return."""
        errors: Any = import_module("ray.exceptions")
        # 1. The call raised before the stage began, as where the stage cannot be unpickled on the actor's host.
        if isinstance(error, errors.RayTaskError) and not isinstance(error, errors.RayActorError):
            cause: BaseException = getattr(error, "cause", error)
            line = str(cause).strip().partition("\n")[0]
            self.progress.handle(Failed(f"could not begin: {type(cause).__name__}: {line}", str(error)))
            return
        # 2. Its process or its node died.
        self.misplaced = self.progress.pid is None and NODE_DIED in str(error)
        self._death = f"died: {_cause_in(str(error))}"

    async def watch(self) -> None:
        """Note its process and its host, once it has started."""
        await asyncio.wait([self._place])
        if not self._place.exception():
            self.progress.pid, self.progress.node = self._place.result()
            self.phase = f"unpickling {self.config.stage}, importing what it needs, and connecting"

    async def finish(self) -> None:
        """End the process of the actor, and wait until its events are handled."""
        await in_thread(self._end)
        if self.progress.peer is not None:
            with anyio.move_on_after(KILL_S):
                await self.progress.peer.gone.wait()

    def kill(self, why: str = "") -> None:
        """Kill the actor; for the reason `why`, where it must be replaced."""
        if self.running:
            self._killed_because = why
            self._end()

    def _end(self) -> None:
        import_ray().kill(self._actor, no_restart=True)

    async def stop(self, within_s: float) -> None:
        """Close the channel for the worker, to cancel its stage, and kill its actor after a deadline."""
        with anyio.CancelScope(shield=True):
            if self.progress.peer is not None:
                await self.progress.peer.dismiss()
                with anyio.move_on_after(within_s) as deadline:
                    await self.exited()
                if deadline.cancelled_caught:
                    log.warning("worker_killed", worker=self.progress.name, pid=self.progress.pid, waited_s=within_s)
            if self.running:
                self._end()
                with anyio.move_on_after(0 if self._head.lost else KILL_S):
                    await self.exited()

    @property
    def exit_reason(self) -> str:
        """The cause of its end."""
        if self._killed_because:
            return self.progress.reason_of(f"{self._killed_because}; it was killed")
        return self.progress.reason_of(self._death)

    def close(self) -> None:
        """Forget the results of its calls."""
        for future in (self._place, self._result):
            if future.done() and not future.cancelled():
                future.exception()  # it was reported
            else:
                future.cancel()


class RaySpawner:
    """Creates the actors of one stage. The stage is pickled once, into Ray's object store."""

    def __init__(self, stage: object, on: Ray, reservation: Reservation) -> None:
        self._stage = stage
        self._keeps_directory = "working_dir" not in on.runtime_env
        self._directory = ""
        """The working directory of the actors, where it exists on their host."""
        self._reservation = reservation
        self._stored: Any = None

    async def __aenter__(self) -> Self:
        await in_thread(self._prepare)
        return self

    def _prepare(self) -> None:
        self._stored = import_ray().put(self._stage)
        if self._keeps_directory:
            self._directory = os.getcwd()  # noqa: PTH109 (a string is wanted)

    async def __aexit__(self, *_: object) -> None:
        self._stored = None

    async def start(self, config: StageConfig) -> RayWorker:
        """Create an actor."""
        actor, place, result = await in_thread(self._create, config)  # not cancelled once it began
        return RayWorker(config, actor, place, result, head=self._reservation.head)

    def _create(self, config: StageConfig) -> tuple[Any, Any, Any]:
        from .ray_worker import StageActor  # noqa: PLC0415 (its module is imported by the actors)

        actor_class = import_ray().remote(StageActor)
        actor = actor_class.options(**self._reservation.options_of(config.worker.index)).remote()
        place = actor.place.remote(config.channels.host)
        return actor, place, actor.run.remote(self._stored, config, self._directory)


def _cause_in(message: str) -> str:
    """Return the sentence of a message of Ray with the cause of a death; the others are ids and advice."""
    sentences = [sentence.strip() for line in message.splitlines() for sentence in line.split(". ")]
    causes = [sentence.rstrip(".") for sentence in sentences if "because" in sentence]
    return causes[0] if causes else next(filter(None, sentences), "Ray gave no reason")
