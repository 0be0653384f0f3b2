"""Run a stage in a worker process of this host; the child's side.

A worker is started by `subprocess.Popen`, never by a fork. It inherits three descriptors: the payload (an anonymous
file with the pickled stage, written by its parent), the page of its ledger's counters, and a pipe for events to the
parent. The kernel kills it when its parent dies. It ends on SIGTERM, and leaves Ctrl-C and SIGHUP to its parent.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import sys
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

import anyio
import msgspec

from ..accounting.shared_counters import SharedCounters
from ..util.exception_groups import single_exception
from ..util.signals import cancelled_by_sigterm, handled_stop_signals
from .worker_messages import Failed, Finished, ProcessConfig, Starting, WorkerEvent, encode_event
from .worker_payload import open_payload
from .worker_stage import Link, description_of, importing_main, run_stage, traceback_of

PR_SET_PDEATHSIG = 1


def main(encoded: str) -> None:
    """Run a stage by its `ProcessConfig`, encoded as JSON."""
    config = msgspec.json.decode(encoded, type=ProcessConfig)
    die_with(config.parent)
    for number in {signal.SIGINT, signal.SIGHUP} & set(handled_stop_signals()):
        signal.signal(number, lambda *_: None)  # a handler, because programs that it starts would inherit SIG_IGN
    for fd in (config.payload, config.counters, config.events, config.watched):
        os.set_inheritable(fd, False)
    try:
        stopped = anyio.run(_run, _load(config), config)
    except BaseException as error:
        cause = single_exception(error)
        _report(config, Failed(description_of(cause), traceback_of(cause)))
        if not isinstance(cause, Exception):
            raise
        sys.exit(1)
    gc.freeze()  # the collections at the exit of the interpreter visit every object, for seconds with torch
    if stopped:
        _end_by_sigterm()
    _report(config, Finished())


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit where that has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _end_by_sigterm() -> None:
    """End this process by SIGTERM, which its sender expects as the exit status, after everything was closed."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _load(config: ProcessConfig) -> Any:
    """Prepare this interpreter by the first pickle of the payload, and return the stage, which is the second."""
    file = open_payload(config.payload)
    preparation = pickle.load(file)  # noqa: S301 (inherited from the parent that started this process)
    script = preparation.get("init_main_from_name") or preparation.get("init_main_from_path")
    if script:
        _report(config, Starting(f"importing {script}"))
    with importing_main():
        spawn.prepare(preparation)
    _report(config, Starting(f"unpickling {config.of_stage.stage} and importing what it needs"))
    return pickle.load(file)  # noqa: S301 (as above)


def _report(config: ProcessConfig, event: WorkerEvent) -> None:
    with suppress(BrokenPipeError):
        os.write(config.events, encode_event(event))


async def _run(stage: Any, config: ProcessConfig) -> bool:
    """Run `stage` until it returns or SIGTERM arrives; return whether it was SIGTERM."""
    url = config.of_stage.channels.outbox_url
    link = Link(url, "shm://", None, "", lambda event: _report(config, event), config.watched)
    with mmap.mmap(config.counters, mmap.PAGESIZE) as page, anyio.CancelScope() as scope, cancelled_by_sigterm(scope):
        counters = SharedCounters(page)
        try:
            await run_stage(stage, config.of_stage, counters, link)
        finally:
            counters.close()
    return scope.cancel_called
