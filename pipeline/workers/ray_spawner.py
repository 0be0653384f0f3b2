"""Workers in actors of Ray; the parent's side.

Ray places an actor, starts its process, and reports its end: the result of its one call, or its death and that of its
node. Events of a running worker arrive with its records (`Supervisor.handle`).
"""

from __future__ import annotations

import asyncio
import os
from importlib import import_module
from typing import Any, Self

import anyio

from ..accounting.telemetry import get_logger
from ..channels.merged_receiver import MergedReceiver
from ..graph.context import Worker
from ..graph.placement import Ray
from .ray_cluster import Reservation, import_ray, in_thread
from .ray_head import RayHead
from .worker_accounting import WorkerAccounting
from .worker_messages import Failed, StageConfig, Starting, WorkerChannels, decode_events
from .worker_progress import WorkerProgress

log = get_logger("penstock.pipeline")

NODE_DIED = "its node has died"
"""Part of Ray's message where a node's death is that of an actor; the exception has no field for it."""

KILL_S = 30.0
"""Seconds that Ray may take to report the end of an actor that was killed."""


class RayWorker:
    """One actor, until Ray has reported its end; a `WorkerHandle`."""

    def __init__(
        self,
        config: StageConfig,
        actor: Any,
        place: Any,
        result: Any,
        *,
        head: RayHead,
        receiver: MergedReceiver[Any],
    ) -> None:
        self._head = head
        self.progress = WorkerProgress(
            config.name,
            config.worker,
            "waiting for its place on a node, and the start of its process",
            has_inbox=bool(config.channels.inbox_kind),
        )
        self._actor = actor
        self._stage = config.stage
        self._receiver = receiver
        self._place = asyncio.wrap_future(place.future())
        self._result = asyncio.wrap_future(result.future())
        self._killed_because = ""
        """The reason for which it was killed and must be replaced."""
        self._death = "ended"
        """The cause of its death, as Ray gives it."""
        self.misplaced: bool = False
        """True if it never ran, because its node had died."""

    @property
    def running(self) -> bool:
        """Return whether Ray has not reported its end."""
        return not self._result.done()

    async def exited(self) -> None:
        """Wait until Ray reports its end, and take in the result."""
        await asyncio.wait([self._result])
        try:
            encoded = self._result.result()
        except Exception as error:  # noqa: BLE001 (of Ray: it died, or could not be started, for any reason)
            self._take_in(error)
        else:
            for event in decode_events(bytearray(encoded)):
                self.progress.handle(event)
        self.progress.connected = self.progress.connected or self._receiver.knows(self.progress.name)

    def _take_in(self, error: Exception) -> None:
        """Take in why there is no result."""
        errors: Any = import_module("ray.exceptions")
        # 1. The call raised before the stage began, as where the stage cannot be unpickled on the actor's host.
        if isinstance(error, errors.RayTaskError) and not isinstance(error, errors.RayActorError):
            cause: Exception = getattr(error, "cause", error)
            line = str(cause).strip().partition("\n")[0]
            self.progress.handle(Failed(f"could not begin: {type(cause).__name__}: {line}", str(error)))
            return
        # 2. Its process or its node died.
        self.misplaced = self.progress.pid is None and NODE_DIED in str(error)
        self._death = f"died: {_cause_in(str(error))}"

    async def receive(self) -> None:
        """Note where it runs, once its process has started."""
        await asyncio.wait([self._place])
        if not self._place.exception():
            self.progress.pid, self.progress.node = self._place.result()
            self.progress.handle(Starting(f"unpickling {self._stage}, importing what it needs, and connecting"))

    async def finish(self) -> None:
        """End the process of the actor."""
        await in_thread(self._end)

    def kill(self, why: str = "") -> None:
        """Kill the actor; for the reason `why`, where it must be replaced."""
        if self.running:
            self._killed_because = why
            self._end()

    def _end(self) -> None:
        import_ray().kill(self._actor, no_restart=True)

    async def stop(self, within_s: float) -> None:
        """Close the channel for the worker, which cancels its stage, and kill its actor after a deadline."""
        with anyio.CancelScope(shield=True):
            if self.progress.connected:
                await self._receiver.dismiss(self.progress.name)
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

    def __init__(
        self,
        stage_name: str,
        stage: object,
        *,
        on: Ray,
        channels: WorkerChannels,
        accounting: WorkerAccounting,
        reservation: Reservation,
        receiver: MergedReceiver[Any],
    ) -> None:
        self._stage_name = stage_name
        self._stage = stage
        self._keeps_directory = "working_dir" not in on.runtime_env
        self._directory = ""
        """The working directory of the actors, where it exists on their host."""
        self._channels = channels
        self._accounting = accounting
        self._reservation = reservation
        self._receiver = receiver
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

    async def start(self, name: str, worker: Worker) -> RayWorker:
        """Create an actor."""
        config = StageConfig(name=name, stage=self._stage_name, worker=worker, channels=self._channels)
        self._accounting.open_reported(name)
        try:
            actor, place, result = await in_thread(self._create, config)  # not cancelled once it began
        except BaseException:
            self._accounting.not_started(name)
            raise
        return RayWorker(config, actor, place, result, head=self._reservation.head, receiver=self._receiver)

    def _create(self, config: StageConfig) -> tuple[Any, Any, Any]:
        from .ray_worker import StageActor  # noqa: PLC0415 (its module is imported by the actors)

        actor_class = import_ray().remote(StageActor)
        actor = actor_class.options(**self._reservation.options_of(config.worker.index)).remote()
        place = actor.place.remote(self._channels.host)
        return actor, place, actor.run.remote(self._stored, config, self._directory)


def _cause_in(message: str) -> str:
    """Return the sentence of a message of Ray that says what died; the others are ids and advice."""
    sentences = [sentence.strip() for line in message.splitlines() for sentence in line.split(". ")]
    causes = [sentence.rstrip(".") for sentence in sentences if "because" in sentence]
    return causes[0] if causes else next(filter(None, sentences), "Ray gave no reason")
