"""SkyRL on a CPU: a tiny model and a data set, and trainers of it that are made in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blockbuster import blockbuster_ctx
from tests.skyrl_real.letters import write_model, write_prompts
from tests.skyrl_real.training import config_of, trainer_of
from tests.worker_processes import worker_processes

MakeTrainer = Callable[..., Any]


@pytest.fixture(autouse=True, scope="session")
def _nothing_blocks_the_event_loop() -> Iterator[None]:
    """Raise BlockingError as everywhere, but for what SkyRL calls in its own loop, which blocks in its checkpoints."""
    with blockbuster_ctx("penstock", excluded_modules=["penstock._stages.integrations.skyrl.trainer"]) as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_in("<frozen importlib._bootstrap>", "_find_and_load")
            function.can_block_in("penstock/_pipeline/accounting/telemetry.py", "__call__")
            function.can_block_in("penstock/_stages/integrations/skyrl/trainer.py", "save_checkpoints")
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_ray() -> Iterator[None]:
    """Have SkyRL, which connects to any cluster of Ray on this machine, start one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture
def make_trainer(model: Path, data: Path, tmp_path: Path) -> MakeTrainer:
    """Return a function that makes a trainer with the generator of that name in `letters`, and with options."""

    def make(named: str = "generator", **options: Any) -> Any:
        return trainer_of(config_of(model, data, tmp_path, **options), f"tests.skyrl_real.letters:{named}")

    return make


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Check that no sampler outlives its training."""
    yield
    assert worker_processes() == []
