"""What code in a worker raises ends a run as an ordinary exception does there: by name, with its text."""

from __future__ import annotations

import anyio
import pytest
from tests.failsafe import FAILSAFE_S
from tests.pipeline.flow_stages import Groups
from tests.processes.exiting_stages import EXITS, Exits, ExitsAsSource, ExitsAsStage
from tests.processes.worker_sinks import Commit

from penstock import Pipeline, SourceEnv, processes, source
from penstock.errors import RolloutsFailed, WorkerFailed
from penstock.policies import NoOpPolicy


def sampling(name: str) -> Pipeline:
    return source(SourceEnv(Exits(name), NoOpPolicy(), name="env"), on=processes(1)).sink(Commit())


def beginning(name: str) -> Pipeline:
    return source(ExitsAsSource(name), on=processes(1)).sink(Commit())


def relaying(name: str) -> Pipeline:
    return source(Groups(8)).then(ExitsAsStage(name), on=processes(1)).sink(Commit())


OFTEN = ("CancelledError", "SystemExit")
"""Exceptions that `make test` raises; `make test-all` raises each of them."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.long]) for name in EXITS]
)
async def test_an_exit_in_a_worker_ends_a_run_by_name(name: str) -> None:
    with anyio.fail_after(FAILSAFE_S):
        with pytest.raises(RolloutsFailed, match=f"environment raised {name}: in a worker"):
            await sampling(name).run()
        with pytest.raises(WorkerFailed, match=f"ExitsAsSource 1/1 .* raised {name}: in a worker"):
            await beginning(name).run()
        with pytest.raises(WorkerFailed, match=f"ExitsAsStage 1/1 .* raised {name}: in a worker"):
            await relaying(name).run()
