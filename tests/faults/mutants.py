"""Mutations of penstock that the matrix has to detect, each with a cell that does.

A mutation is made in the process from which the cell's processes are forked. Workers are interpreters of their own, and
stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from tests.faults import verdict
from tests.faults.cells import Cell

from penstock._pipeline.channels import shm
from penstock._pipeline.channels.peers import Peers
from penstock._pipeline.channels.segment import SegmentWriter
from penstock._pipeline.channels.shm import SlotReader
from penstock._pipeline.channels.socket_directory import sweep, sweep_after
from penstock._pipeline.workers import worker_process
from penstock._pipeline.workers.worker_accounting import WorkerAccounting

__all__ = ["MUTANTS", "mutate"]


def _replace(owner: Any, method: Callable[..., Any], made: Callable[..., Callable[..., Any]]) -> None:
    setattr(owner, method.__name__, made(method))


def _nothing_is_recovered() -> None:
    _replace(SlotReader, SlotReader.recover, lambda _: lambda *_: [])


def _all_is_recovered_again() -> None:
    _replace(SlotReader, SlotReader.recover, lambda recover: lambda reader, _: recover(reader, 0))


def _a_bit_flips_in_transit() -> None:
    def made(write: Callable[..., None]) -> Callable[..., None]:
        def flipped(segment: Any, span: Any, contents: bytes, records: Any, layout: Any, **options: Any) -> None:
            write(segment, span, contents, records, layout, **options)
            _, (index, first, _), *_ = layout.places  # of the tokens
            items = segment._typed[index]
            items[(segment._payload + span.start * segment.slot_bytes) // items.itemsize + first] ^= 1

        return flipped

    _replace(SegmentWriter, SegmentWriter.write, made)


def _a_death_is_taken_for_a_close() -> None:
    def made(on_disconnect: Callable[..., Any]) -> Callable[..., Any]:
        def quietly(peers: Any, peer: Any) -> Any:
            peer.open = False
            return on_disconnect(peers, peer)

        return quietly

    _replace(Peers, Peers.on_disconnect, made)


def _records_of_a_dead_worker_are_not_settled() -> None:
    _replace(WorkerAccounting, WorkerAccounting._settle, lambda _: lambda *_: None)


def _sockets_of_dead_processes_stay() -> None:
    for module in (worker_process, shm):
        _replace(module, sweep, lambda _: lambda: None)
    _replace(shm, sweep_after, lambda _: lambda _: None)


def _descriptors_stay_open() -> None:
    _replace(worker_process.WorkerProcess, worker_process.WorkerProcess.close, lambda _: lambda _: None)


def _deaths_are_noticed_late() -> None:
    def made(exited: Callable[..., Any]) -> Callable[..., Any]:
        async def later(child: Any) -> None:
            await exited(child)
            await anyio.sleep(1.1)

        return later

    _replace(worker_process.WorkerProcess, worker_process.WorkerProcess.exited, made)
    verdict.NOTICED_WITHIN_S = 1.0


MUTANTS: dict[Callable[[], None], tuple[Cell, str]] = {
    _nothing_is_recovered: (Cell("producer", "SIGKILL", "published"), "assert count =="),
    _all_is_recovered_again: (Cell("producer", "SIGKILL", "idle"), "violated the protocol"),
    _a_bit_flips_in_transit: (Cell("consumer", "SIGKILL", "reading"), "differs from what was sent"),
    _a_death_is_taken_for_a_close: (Cell("producer", "_exit", "idle"), "in history.noticed"),
    _records_of_a_dead_worker_are_not_settled: (Cell("middle", "SIGKILL", "reading"), "RecordsSwallowed"),
    _sockets_of_dead_processes_stay: (Cell("middle", "zombie", "reading"), "expected no socket to be left"),
    _descriptors_stay_open: (Cell("middle", "stall", "idle"), "assert left == "),
    _deaths_are_noticed_late: (Cell("middle", "exception", "idle"), "expected within 1.0 s"),
}
"""Mutations, each with a cell that detects it, and a part of its message."""


def mutate(name: str) -> None:
    """Make the mutation of this name in this process."""
    next(mutant for mutant in MUTANTS if mutant.__name__ == name)()
