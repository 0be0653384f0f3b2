"""Run a stage in a worker process of this host; the child's side.

A worker is started by `subprocess.Popen`, never by a fork. It inherits two descriptors: the payload (an anonymous file
with the pickled stage, written by its parent), and a file for the phase of its start and the count of its event loop.
The kernel kills it when its parent dies. It ends on SIGTERM, and leaves Ctrl-C and SIGHUP to its parent.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

import anyio

from ..._schemas.conversion import decode_json
from ..util.signals import cancelled_by_sigterm, handled_stop_signals
from .loop_watch import note_phase
from .worker_messages import Failed, ProcessConfig, WorkerEvent
from .worker_payload import open_payload
from .worker_stage import Link, importing_main, run_stage

PR_SET_PDEATHSIG = 1


def main(encoded: str) -> None:
    """Run a stage by its `ProcessConfig`, encoded as JSON."""
    config = decode_json(encoded, ProcessConfig)
    die_with(config.parent)
    for number in {signal.SIGINT, signal.SIGHUP} & set(handled_stop_signals()):
        signal.signal(number, lambda *_: None)  # a handler, because programs that it starts would inherit SIG_IGN
    for fd in (config.payload, config.watched):
        os.set_inheritable(fd, False)
    try:
        stage, error = _load(config), None
    except BaseException as raised:  # noqa: BLE001 (whatever the stage's modules raise; it is reported)
        stage, error = None, raised
    event, stopped = anyio.run(_run, stage, error, config)
    if isinstance(event, Failed):
        sys.exit(1)
    gc.freeze()  # the collections at the exit of the interpreter visit every object, for seconds with torch
    if stopped:
        _end_by_sigterm()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit where that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _end_by_sigterm() -> None:
    """End this process by SIGTERM, the exit status that its sender expects, after everything was closed."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _load(config: ProcessConfig) -> Any:
    """Return the stage."""

    def note(script: str) -> None:
        loading = f"unpickling {config.stage} and importing what it needs"
        note_phase(config.watched, f"importing {script}" if script else loading)

    return load_payload(config.payload, note)


def load_payload(payload: int, note: Callable[[str], object] = lambda _: None) -> Any:
    """Prepare this interpreter by the first pickle of a payload, and return the value; close the descriptor.

    `note` is called with the name of the script before that is imported, and with "" before the value is unpickled.
    """
    file = open_payload(payload)
    preparation = pickle.load(file)  # noqa: S301 (of the parent that started this process)
    script = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
    if script:
        note(script)
    with importing_main():
        spawn.prepare(preparation)
    note("")
    return pickle.load(file)  # noqa: S301 (as above)


async def _run(stage: Any, error: BaseException | None, config: ProcessConfig) -> tuple[WorkerEvent | None, bool]:
    """Run `stage`, or report the error of loading it; return its end, and whether SIGTERM came."""

    def loaded() -> Any:
        if error is not None:
            raise error
        return stage

    note_phase(config.watched, f"connecting to {config.outbox_url}")
    link = Link(config.outbox_url, config.outbox_kind, "shm://", None, "", config.watched)
    event = None
    with anyio.CancelScope() as scope, cancelled_by_sigterm(scope):
        event = await run_stage(loaded, config.name, link)
    return event, scope.cancel_called
