"""Atropos' environments beside SkyRL's trainer, each with the interpreter of its project: `make test-atropos-skyrl`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.atropos_real.conftest import checkout as checkout  # noqa: PLC0414 (a fixture)
from tests.atropos_real.conftest import model as model  # noqa: PLC0414 (a fixture)
from tests.atropos_real.processes import PYTHON, offline
from tests.atropos_skyrl_real.pair import OPTIONS, SETTINGS, Settings, environments, write_model, write_prompts
from tests.skyrl_real.conftest import (
    _nothing_blocks_the_event_loop as _nothing_blocks_the_event_loop,  # noqa: PLC0414 (a fixture)
)
from tests.skyrl_real.conftest import _one_thread as _one_thread  # noqa: PLC0414 (a fixture)
from tests.skyrl_real.conftest import _own_ray as _own_ray  # noqa: PLC0414 (a fixture)
from tests.skyrl_real.training import config_of, trainer_of

MakeTrainer = Callable[..., Any]

MAKE_WORKSPACE = """
from pathlib import Path
from sys import argv
from tests.atropos_real.workspace import make_workspace
make_workspace(Path(argv[1]))
"""


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the tokenizer and the data sets of the environments, by their interpreter."""
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hub"))
    folder = tmp_path_factory.mktemp("workspace")
    subprocess.run([PYTHON, "-c", MAKE_WORKSPACE, str(folder)], env=offline(), check=True)
    return folder


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def settings(
    checkout: Path, workspace: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Settings]]:
    """Return a function that says how groups travel; end the environments that were started."""

    def say(**how: str) -> Settings:
        said = Settings(str(checkout), str(workspace), model, str(tmp_path), **how)
        monkeypatch.setenv(SETTINGS, msgspec.json.encode(said).decode())
        return said

    yield say
    while environments:
        environments.pop().stop()


@pytest.fixture
def make_trainer(policy: Path, tmp_path: Path) -> MakeTrainer:
    """Return a function that makes SkyRL's trainer, whose groups arrive."""
    data = write_prompts(tmp_path / "prompts.jsonl")

    def make(**options: Any) -> Any:
        return trainer_of(
            config_of(policy, data, tmp_path, **OPTIONS, **options), "tests.atropos_skyrl_real.pair:generator"
        )

    return make
