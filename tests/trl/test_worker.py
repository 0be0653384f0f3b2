"""The worker and the transfer have TRL's methods, and say what is wrong before they start anything."""

from __future__ import annotations

import importlib.util
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.trl.contract import TRANSFER, WORKER, methods_of

from penstock import SourceEnv, source
from penstock.errors import FlowEnded, InvalidConfig, InvalidPipeline, MissingExtra, WeightsMismatch
from penstock.integrations.trl import TRLTransfer, TRLWorker
from penstock.policies import EnginePublisher, NoOpPolicy
from penstock.weights import WeightPublisher


def unused() -> Any:
    raise AssertionError("expected no environment to be made")


def worker() -> TRLWorker:
    return TRLWorker(source(SourceEnv(unused, NoOpPolicy())))


def test_the_worker_has_the_methods_that_trl_calls() -> None:
    assert methods_of(TRLWorker).items() >= WORKER.items()
    assert methods_of(TRLTransfer).items() >= TRANSFER.items()


def test_a_trainer_without_the_callback_is_refused_when_it_begins() -> None:
    with pytest.raises(InvalidPipeline, match=r"callbacks=\[worker\.callback\(\)\]"):
        worker().start()


@pytest.mark.skipif(importlib.util.find_spec("trl") is not None, reason="TRL is installed")
def test_without_trl_the_command_that_installs_it_is_named() -> None:
    trained = worker()
    args = SimpleNamespace(max_staleness=4, token_budget=64, temperature=1.0)
    trained.train_begins(args, SimpleNamespace(collate_fn=unused), None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[trl\]'"):
        trained.start()


def test_a_worker_that_does_not_run_is_not_waited_for() -> None:
    with pytest.raises(FlowEnded, match="its worker does not run"):
        worker().check_health(300)


def test_a_worker_that_was_not_started_stops_without_a_report() -> None:
    stopped = worker()

    stopped.stop()

    assert stopped.report is None
    assert repr(stopped).startswith("<TRLWorker: not started, version 0")
    with pytest.raises(RuntimeError, match="before training began"):
        stopped.statistics()


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="capacity"):
        TRLWorker(source(SourceEnv(unused, NoOpPolicy())), capacity=0)


def test_versions_begin_with_1_as_those_of_trl_do_and_tied_tensors_are_completed() -> None:
    shared = np.ones(2, np.float32)
    publisher = WeightPublisher({"embed": shared, "head": shared, "norm": np.ones(3, np.float32)})
    assert publisher.ties == EnginePublisher(publisher, []).ties == {"head": "embed"}
    transfer = TRLTransfer(publisher)

    transfer.init_weight_transfer()
    for expected in (1, 2):
        transfer.pause()
        transfer.send_weights(iter([("embed", shared), ("norm", np.zeros(3, np.float32))]))
        transfer.resume()
        assert (transfer.version, publisher.version) == (expected, expected)
    with pytest.raises(WeightsMismatch, match="norm: expected float32"):
        transfer.send_weights(iter([("embed", shared)]))
    transfer.destroy()
    transfer.destroy()

    assert "penstock-trl-weights" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="expected init_weight_transfer"):
        transfer.send_weights(iter([]))
