"""The progress of one worker, by the events that it has reported."""

from __future__ import annotations

import anyio

from ..accounting.telemetry import get_logger
from ..channels.peer import Peer
from ..graph.statistics import WorkerState, WorkerStatistics
from .event_order import EventOrder
from .worker_messages import Connected, Dies, Failed, Finished, Leaves, Left, Serving, StageConfig, WorkerEvent

log = get_logger("penstock.pipeline")


class WorkerProgress:
    """The state of one start of a worker."""

    def __init__(self, config: StageConfig) -> None:
        self.name = config.name
        """`SourceEnv 2/4, restart 1`."""
        self.state: WorkerState = "starting"
        self.peer: Peer | None = None
        """Its connection, from its place to its end."""
        self.violation = ""
        """The reason why it was disconnected."""
        self.order = EventOrder(has_inbox=bool(config.channels.inbox_kind))
        self.started = anyio.Event()
        """Set when its stage begins; for a middle stage, when records may be sent to it."""
        self.finished = False
        """True once its stage has returned."""
        self.failure: Failed | None = None
        """The exception of its stage, if it raised one."""
        self.done = anyio.Event()
        """Set when the stage returned or raised, or the worker left: its process is about to end."""
        self.leaving = anyio.Event()
        """Set when it takes no more work, for it is about to end."""
        self.left = ""
        """The reason why it left before its stage was done."""
        self.dies = ""
        """The reason why it ends its process, where it has reported one."""
        self.url = ""
        """The URL for records, once a middle stage has started; empty before."""
        self.pid: int | None = None
        self.node = ""
        """The address of the host where it runs; empty on the host of the pipeline's processes."""
        self.transport = ""
        """`shm` or `tcp`, once it has connected."""
        self.numa = ""
        """The NUMA node that it is bound to, or the reason why it is not, once it has connected."""
        self._restarts = config.worker.restart
        self._has_inbox = bool(config.channels.inbox_kind)

    def handle(self, event: WorkerEvent) -> None:
        """Take in an event that the worker has reported."""
        match event:
            case Connected(transport, pid, node, numa):
                self.state, self.transport = "running", transport
                self.pid, self.node, self.numa = pid, node, numa
                log.info("worker_connected", worker=self.name, pid=pid, node=node, transport=transport, numa=numa)
                if not self._has_inbox:
                    self.started.set()
            case Serving(url):
                self.url = url
                self.started.set()
            case Leaves():
                self.leaving.set()
            case Left(reason):
                self.left = reason
                self.done.set()
            case Dies(reason):
                self.dies = reason
                self.done.set()
            case Finished():
                self.finished = True
                self.done.set()
            case Failed():
                self.failure = event
                self.done.set()
                self.started.set()

    def end(self) -> None:
        """Set the final state; one that was stopped counts as finished."""
        if self.peer is not None:
            self.violation = self.peer.violation
        if self.state == "stopping" or self.finished or self.left:
            self.state = "finished"
        else:
            self.state = "failed" if self.failure else "dead"

    @property
    def label(self) -> str:
        """Return its name, its process and its host: `SourceEnv 2/4 (pid 4711 on 10.0.0.2)`."""
        if self.pid is None:
            return self.name
        return f"{self.name} (pid {self.pid}{' on ' if self.node else ''}{self.node})"

    def reason_of(self, death: str) -> str:
        """Return the cause of its exit, for the trajectories that are lost with it; `death` if it reported no cause."""
        # 1. The stage returned: trajectories that it still holds were neither sent nor dropped.
        if self.finished:
            return f"swallowed by {self.label}"
        # 2. The stage raised.
        if self.failure is not None:
            return f"{self.label} {self.failure.error}"
        # 3. It left before its stage was done.
        if self.left:
            return f"{self.label} left: {self.left}"
        # 4. It was disconnected for what it sent; or died, for a reason that it has reported, or not.
        return f"{self.label} {self.violation or self.dies or death}"

    def statistics(self, name: str, phase: str, lag: int | None) -> WorkerStatistics:
        """Return its state now, under the name that it has in all its starts, with its lag."""
        return WorkerStatistics(
            name=name,
            pid=self.pid,
            state=self.state,
            restarts=self._restarts,
            starting=phase if self.state == "starting" else "",
            node=self.node,
            transport=self.transport,
            numa=self.numa,
            lag=lag,
        )
