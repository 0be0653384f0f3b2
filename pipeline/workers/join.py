"""Join a pipeline as a worker, from any host; the worker's side.

The worker makes its stage on its own host, of a configuration or a script whose digest the pipeline compares. Over the
wire come its place, the address of the weights and the numbers of prompts, decoded strictly, and no code.

A worker that is asked to stop takes no more work, and completes its present one, until a deadline. One whose connection
ends before the pipeline is done connects again.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import os
import platform
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from ..._schemas import TrajectoryGroup
from ..._schemas.bounds import cut
from ..._schemas.config import nearest
from ..channels.default_key import default_key
from ..channels.keys import ChannelKey
from ..channels.remote_sender import RemoteSender
from ..channels.tcp_address import bracketed
from ..channels.transports import connect
from ..errors import (
    DiskFull,
    InvalidConfig,
    InvalidPipeline,
    NobodyListens,
    NotWritable,
    OutOfFileDescriptors,
    OutOfSharedMemory,
    PeerClosed,
    PeerLost,
    SenderRejected,
    SenderTimedOut,
    TooManySenders,
    WorkerCutOff,
    WorkerRefused,
)
from ..graph.stage_info import name_of
from ..util.cancelling import cancelled_after
from ..util.exception_groups import single_exception
from ..util.retry_pace import RetryPace
from ..util.signals import REPEATED, handled_stop_signals
from ..weights.weight_address import WeightAddress
from .worker_messages import (
    Failed,
    Finished,
    Joined,
    KeylessAddress,
    Leaves,
    Left,
    NoneLeft,
    Refused,
    StageConfig,
    WorkerEvent,
    WorkerInstruction,
)
from .worker_stage import Instructions, Link, description_of, importing_main, run_connected, send_event, traceback_of

DRAIN_TIMEOUT_S = 25.0
"""Seconds that a worker may take, once it is asked to stop, to complete its work: SLURM and Kubernetes give 30 between
SIGTERM and SIGKILL."""

NO_PIPELINE_TIMEOUT_S = 3600.0
"""Seconds without a pipeline until a worker ends: one may evaluate its model before workers can join."""

MakeStage: TypeAlias = Callable[[WeightAddress | None], Any]
"""Makes the stage. It samples with the weights at this address, if the pipeline publishes any."""

LOST_TOGETHER_S = 5.0
"""Seconds between the ends of two connections to one process that died, or less."""

_UNREACHABLE = (NobodyListens, PeerClosed, PeerLost)
_UNAVAILABLE = (*_UNREACHABLE, TooManySenders, socket.gaierror)
"""Errors that may pass while a worker waits: no pipeline listens yet, or no resolver knows its name."""

_OF_THIS_HOST = (OutOfFileDescriptors, OutOfSharedMemory, DiskFull, NotWritable)
"""Errors by a limit of this host; other workers may not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of a worker."""

    make_stage: MakeStage
    digest: str
    """Of the configuration or the script that it is made of."""


def program_in(script: str) -> Program:
    """Return the program of a worker in a script, `train.py:sampler`: a stage, or a function that returns one. Blocks.

    The function takes no argument, or the `WeightAddress` of the published weights.

    Raises:
        InvalidConfig: `script` has another form, or there is no such file, or no such name in it.
        Exception: raised by the script while it was imported.
    """
    file, _, name = script.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not name.isidentifier():
        raise InvalidConfig(
            f"expected a configuration or script.py:function, for example train.py:sampler, got {script!r}"
        )
    if not path.is_file():
        raise InvalidConfig(f"expected a script, got {file}, where there is none")
    sys.path.insert(0, str(path.parent.absolute()))  # as if it was run
    with importing_main():
        module = importlib.import_module(path.stem)
    if not hasattr(module, name):
        raise InvalidConfig(f"expected a function or a stage of {file}, got {name!r}{nearest(name, dir(module))}")
    made = getattr(module, name)

    def make_stage(weights: WeightAddress | None) -> Any:
        if hasattr(made, "run"):
            return made
        return made(weights) if inspect.signature(made).parameters else made()

    return Program(make_stage=make_stage, digest=digest_of(path))


def digest_of(path: Path) -> str:
    """Return the digest of a script. Blocks."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of_main() -> str:
    """Return the digest of the running script. Blocks.

    Raises:
        ValueError: it is in no file.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).exists():
        raise ValueError(
            "expected a script in a file, whose content workers that join can compare, got one of standard input, of "
            "-c or of an interactive session"
        )
    return digest_of(Path(path))


def key_of(path: str) -> ChannelKey:
    """Return the key in the file, created if need be; without a path that of this user. Blocks.

    Raises:
        InvalidKey, KeyUnavailable, NotWritable: it cannot be used.
    """
    if not path:
        return default_key()
    try:
        return ChannelKey.create(path)
    except FileExistsError:
        return ChannelKey.load(path)


def default_name() -> str:
    """Return a name for this worker: its host, and its process id."""
    return f"{platform.node()}:{os.getpid()}"


async def join(
    url: str,
    program: Program,
    *,
    key: ChannelKey,
    name: str,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    tell: Callable[[str], None],
) -> None:
    """Run a stage for the pipeline at `url`, until it is done or a stop signal arrives; report events by `tell`.

    Raises:
        WorkerRefused: the pipeline has no place for it.
        WorkerCutOff: this host does not reach a server of the stage, such as that of the weights; the pipeline goes on.
        NobodyListens, PeerClosed, PeerLost: there was no pipeline for an hour.
        OutOfFileDescriptors, OutOfSharedMemory, DiskFull, NotWritable: a limit of this host is too low for it.
        SenderRejected: the pipeline disconnected this worker: its messages were damaged, or it cannot be reached.
        Exception: that of the stage; the pipeline has been told.
    """
    stopping = anyio.Event()
    async with _on_signals(stopping, drain_timeout_s):
        pace, told = RetryPace(NO_PIPELINE_TIMEOUT_S), False
        while not stopping.is_set():
            session = None
            try:
                async with connect(url, TrajectoryGroup, name=name, key=key) as sender:
                    session = _Session(url, program, key, sender, stopping)
                    if await session.run(tell):
                        tell("stopped" if stopping.is_set() else str(sender.failure or "nothing is left to do"))
                        return
                pace.restart()
                told = False
                tell(f"connecting again: {sender.failure}")
            except _UNAVAILABLE as error:
                if session is not None or pace.expired:
                    raise
                if not told:
                    tell(f"waiting for the pipeline: {error}")
                told = True
            async with cancelled_after(stopping.wait):
                await pace.wait()


@asynccontextmanager
async def _on_signals(stopping: anyio.Event, drain_timeout_s: float) -> AsyncIterator[None]:
    """Set `stopping` at a stop signal within the body, and cancel the body after a deadline, or at the next one."""
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def stop(by: signal.Signals) -> None:
            if stopping.is_set() and by != REPEATED:
                scope.cancel()
            elif not stopping.is_set():
                stopping.set()
                scope.deadline = anyio.current_time() + drain_timeout_s

        numbers = handled_stop_signals()
        for number in numbers:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


class _Session:
    """One connection to the pipeline, from the request for a place on."""

    def __init__(
        self, url: str, program: Program, key: ChannelKey, sender: RemoteSender[Any], stopping: anyio.Event
    ) -> None:
        self._url = url
        self._program = program
        self._key = key
        self._sender = sender
        self._stopping = stopping
        self._instructions = Instructions(sender)

    async def run(self, tell: Callable[[str], None]) -> bool:
        """Ask for a place, and run the stage in it; return whether all work here is done.

        Raises:
            WorkerRefused: there is no place.
            Exception: that of the stage.
        """
        match await self._answer():
            case Joined() as joined:
                tell(f"joined {self._url} as {joined.config.name}")
                await self._run(joined)
            case Refused(reason):
                raise WorkerRefused(f"the pipeline at {self._url} has no place for this worker: {reason}")
            case NoneLeft():
                return True
            case _:
                pass  # it was asked to stop, or the connection has ended
        return self._stopping.is_set() or not isinstance(self._sender.failure, PeerLost | SenderTimedOut)

    async def _answer(self) -> WorkerInstruction | None:
        """Ask for a place; return None where this worker is asked to stop before, or the connection ends."""
        async with cancelled_after(self._stopping.wait):
            return await self._instructions.place(self._program.digest)
        return None

    async def _run(self, joined: Joined) -> None:
        config = joined.config
        node = await anyio.to_thread.run_sync(_own_address, self._url)
        link = Link(self._url, config.channels.outbox_kind, f"tcp://{bracketed(node)}:0", self._key, node)
        stage = self._made(config.stage, joined.weights)
        event: WorkerEvent = Left("it was stopped, and did not complete in time what it had begun")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._drain, config, tasks.cancel_scope)
                await run_connected(stage, joined, link, self._sender, self._instructions)
                tasks.cancel_scope.cancel()
            event = Left("it was stopped") if self._stopping.is_set() else Finished()
        except Exception as error:  # noqa: BLE001 (of the stage, which may raise anything)
            cause = single_exception(error)
            # 1. A limit of this host is too low, which others may not have: it leaves.
            if isinstance(cause, _OF_THIS_HOST):
                event = Left(cut(str(cause)))
                raise cause from None
            # 2. The stage raised: so it would elsewhere, and the run ends. Or the pipeline has rejected this worker.
            if isinstance(cause, SenderRejected) or not isinstance(cause, _UNREACHABLE):
                event = Failed(description_of(cause), traceback_of(cause))
                raise cause from None
            # 3. The pipeline has died, and the stage has noticed it first, as by its weights: this worker joins again.
            # 4. This host does not reach something that others may reach: it leaves.
            if not await self._pipeline_lost():
                event = Left(cut(str(cause)))
                raise WorkerCutOff(f"this host does not reach what its stage needs: {cause}") from cause
        finally:
            self._report(event)

    async def _pipeline_lost(self) -> bool:
        """Return whether the connection ends too, soon enough for the end of one process."""
        with anyio.move_on_after(LOST_TOGETHER_S):
            await self._sender.wait_failed()
        return self._sender.failure is not None

    async def _drain(self, config: StageConfig, scope: anyio.CancelScope) -> None:
        """Take no more work once this worker is asked to stop; cancel a source that cannot be told so."""
        await self._stopping.wait()
        self._report(Leaves())
        if not config.channels.told_to_leave:
            scope.cancel()

    def _made(self, name: str, published: KeylessAddress | None) -> Any:
        """Return the stage of this name; if it cannot be made, this worker alone leaves."""
        try:
            stage = self._program.make_stage(None if published is None else self._address(published))
        except Exception as error:
            self._report(Left(cut(f"could not make its stage: {error}")))
            raise
        if name_of(stage) == name:
            return stage
        self._report(Left(f"made the stage {name_of(stage)}"))
        raise InvalidPipeline(f"expected the stage {name}, got {name_of(stage)}: name another function")

    def _address(self, published: KeylessAddress) -> WeightAddress:
        """Return the address of the weights: at the host that this worker has joined, as it reaches that."""
        host, port = urlsplit(self._url).hostname or "", urlsplit(published.url).port
        url = f"tcp://{bracketed(host)}:{port}"
        return WeightAddress(
            url,
            self._key,
            published.local,
            published.host,
            published.generation,
            trusted_link=published.trusted_link,
        )

    def _report(self, event: WorkerEvent) -> None:
        send_event(self._sender, event)


def _own_address(url: str) -> str:
    """Return the address that this host has on the way to that of `url`. Blocks."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
