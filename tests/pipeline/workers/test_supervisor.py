"""Preparing a child process, and what a sender may do, without one; tests/processes/test_workers.py starts some."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass

import pytest
from tests.pipeline.flow_stages import Count

from penstock._pipeline.channels.peer import Peer
from penstock._pipeline.graph.edge import EdgeCounter
from penstock._pipeline.graph.placement import Processes
from penstock._pipeline.servers.subreaper_process import describe_exit
from penstock._pipeline.workers import worker_stage
from penstock._pipeline.workers.supervisor import Supervisor
from penstock._pipeline.workers.worker_accounting import WorkerAccounting
from penstock._pipeline.workers.worker_messages import Failed, Joins, Wants, WorkerEvent
from penstock._pipeline.workers.worker_payload import open_payload, write_payload
from penstock._schemas.bounds import LONGEST_TRACEBACK
from penstock._schemas.control import PROTOCOL_VERSION, Connect
from penstock.accounting import Ledger, Metrics
from penstock.errors import InvalidConfig, ProtocolMismatch, StageFailed


@dataclass(frozen=True)
class LivesElsewhere:
    """Pretends to be defined in the script."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("of __main__",)


def preparation_for(stage: object) -> dict[str, object]:
    with open_payload(write_payload(stage)) as file:
        prepared: dict[str, object] = pickle.load(file)  # noqa: S301 (written above)
        assert pickle.load(file) is not None  # noqa: S301 (written above)
    return prepared


def test_the_script_is_imported_in_a_worker_only_if_the_stage_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    without, needing = preparation_for(Count(1)), preparation_for(LivesElsewhere())

    assert not any(key.startswith("init_main") for key in without)
    assert any(key.startswith("init_main") for key in needing)


def test_no_secret_of_the_parent_is_handed_on() -> None:
    assert "authkey" not in preparation_for(Count(1))


def test_a_real_time_signal_has_a_number_for_a_name() -> None:
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"


def test_a_worker_that_imports_its_parents_script_begins_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_stage.refuse_while_importing_main()
    monkeypatch.setattr(worker_stage, "_importing_main", True)

    with pytest.raises(RuntimeError, match="under `if __name__ == '__main__':`"):
        worker_stage.refuse_while_importing_main()


@pytest.mark.parametrize(
    ("error", "described", "traced"),
    [
        (InvalidConfig("seed: expected 1, got 2"), "raised InvalidConfig: seed: expected 1, got 2", False),
        (KeyError("prompt"), "raised KeyError: 'prompt'", True),
        (StageFailed("Judge raised KeyError: 'prompt'"), "failed: Judge raised KeyError: 'prompt'", True),
    ],
)
def test_an_error_of_penstock_is_told_without_its_traceback(error: Exception, described: str, traced: bool) -> None:  # noqa: FBT001
    failed = Failed(worker_stage.description_of(error), worker_stage.traceback_of(error))

    assert failed.error == described
    assert ("In the worker:" in failed.message("it raised")) == traced


def test_a_long_traceback_is_cut_at_its_beginning() -> None:
    error = ValueError("x" * 2 * LONGEST_TRACEBACK)

    text = worker_stage.traceback_of(error)

    assert len(text) == LONGEST_TRACEBACK
    assert text.startswith("…x")


def test_a_sender_that_was_not_started_from_here_gets_no_place() -> None:
    ledger = Ledger()
    accounting = WorkerAccounting(ledger, Metrics(), EdgeCounter(), source=True)
    supervisor = Supervisor("Sample", Processes(1), accounting, ledger)
    stranger = Peer(Connect(PROTOCOL_VERSION, "shm", "group", b"identity", "Sample 1/1", 7), lambda _: None, 1)

    with pytest.raises(ProtocolMismatch, match="expected the name of a worker that was started and has no place yet"):
        supervisor.handle(stranger, Joins())

    assert not accounting.takes(stranger)


@pytest.mark.parametrize("event", [Wants(), Failed("raised ValueError: no", "")])
def test_an_event_of_a_sender_without_a_place_changes_nothing(event: WorkerEvent) -> None:
    ledger = Ledger()
    supervisor = Supervisor(
        "Sample", Processes(1), WorkerAccounting(ledger, Metrics(), EdgeCounter(), source=True), ledger
    )
    before = supervisor.statistics()

    supervisor.handle(
        Peer(Connect(PROTOCOL_VERSION, "shm", "group", b"identity", "Sample 1/1", 7), lambda _: None, 1), event
    )

    assert supervisor.statistics() == before
