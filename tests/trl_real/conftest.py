"""TRL's trainers on a CPU: a tiny model, and the two functions that need a GPU replaced."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.trl_real.letters import write_model
from tests.trl_real.training import trainer_of
from tests.trl_real.tree_attention import flash_attn_varlen_func

MakeTrainer = Callable[..., Any]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_trainer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTrainer:
    """Return a function that makes an AsyncGRPOTrainer of a worker and a publisher, with options."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    package = "trl.experimental.async_grpo"
    packing, trainer = (importlib.import_module(f"{package}.{name}") for name in ("packing", "async_grpo_trainer"))
    kernel = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(trainer, "get_peak_flops_per_device", lambda *_: None)

    def make(worker: Any, publisher: Any, **options: Any) -> Any:
        return trainer_of(model, tmp_path / "trained", worker, publisher, **options)

    return make
