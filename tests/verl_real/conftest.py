"""A Ray with verl's TransferQueue, and verl's own configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tests.trl_real.letters import write_model
from tests.verl_real import flows
from tests.verl_real.framework import hydra, omegaconf, pandas, ray, tq

from penstock import TrajectoryGroup
from penstock.integrations.verl import PenstockLoopManager

ROOT = Path(__file__).parent.parent.parent

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

CORES = 8
"""That Ray is told of: TransferQueue asks for more than two, and waits for ever where there are fewer."""

PLUGGED_IN = [
    "actor_rollout_ref.model.external_lib=penstock.integrations.verl_backend",
    "actor_rollout_ref.rollout.name=penstock",
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=penstock.integrations.verl.PenstockLoopManager",
    "trainer.val_before_train=False",
]

OPTIONS = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=2",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[]",
    "trainer.resume_mode=disable",
]

LETTERS = "tests.verl_real.flows:letters"

MakeConfig = Callable[..., Any]

MakeManager = Callable[..., PenstockLoopManager]


@contextmanager
def running_transfer_queue() -> Iterator[None]:
    """Run Ray, and TransferQueue on it."""
    torch.set_num_threads(1)
    with TemporaryDirectory(prefix="ray") as folder:  # pytest's folders have paths too long for sockets
        ray.init("local", num_cpus=CORES, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        storage = {"num_data_storage_units": 1, "total_storage_size": 1000}
        tq.init(omegaconf.OmegaConf.create({"backend": {"SimpleStorage": storage}}))
        yield
        tq.close()
        ray.shutdown()


@pytest.fixture(scope="session")
def _transfer_queue() -> Iterator[None]:
    with running_transfer_queue():
        yield


@pytest.fixture
def transfer_queue(_transfer_queue: None) -> Iterator[Any]:
    """The TransferQueue, which is empty when a test begins."""
    yield tq
    for partition, items in tq.kv_list().items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)


def config_of(*lines: str, flow: str = "tests.verl_real.flows:given") -> Any:
    """Return verl's configuration, with lines that are added to it."""
    named = f"+actor_rollout_ref.rollout.custom.flow={flow}"
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=[*OPTIONS, *PLUGGED_IN, named, *lines])


@pytest.fixture
def make_config() -> MakeConfig:
    """Return a function that makes verl's configuration, with lines that are added to it."""
    return config_of


@pytest.fixture
def make_manager(transfer_queue: Any, make_config: MakeConfig) -> Iterator[MakeManager]:  # noqa: ARG001
    """Return a function that makes the manager as verl does, of groups and lines of configuration."""
    made: list[PenstockLoopManager] = []

    def make(groups: list[TrajectoryGroup], *lines: str, flow: str = "given") -> PenstockLoopManager:
        flows.GROUPS[:] = groups
        manager = PenstockLoopManager.create(
            config=make_config(*lines, flow=f"tests.verl_real.flows:{flow}"),
            llm_client=None,
            teacher_client=None,
            reward_loop_worker_handles=None,
        )
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Run a process group of one, which the engines of verl's actor ask for their rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def _process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(tmp_path_factory.mktemp("group")):
        yield


def training_of(model: Path, folder: Path, *others: str, publisher: Sequence[str] = (), flow: str = LETTERS) -> Any:
    """Return the configuration of a training of letters in `folder`, with lines that are added to it."""
    row = {
        "prompt": [{"role": "user", "content": "abc"}],
        "data_source": "letters",
        "reward_model": {"ground_truth": "e"},
    }
    pandas.DataFrame([row] * 64).to_parquet(folder / "prompts.parquet")
    kwargs = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.penstock"
    own = [
        f"{kwargs}.publisher=tests.verl_real.flows:publisher",
        f"{kwargs}.url_file={folder}/url",
        f"{kwargs}.model={model}",
    ]
    lines = [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.train_batch_size=4",
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]
    return config_of(*lines, *(publisher or own), *others, flow=flow)


@pytest.fixture
def make_training(
    transfer_queue: Any,  # noqa: ARG001 (trains with it)
    _process_group: None,
    model: Path,
    tmp_path: Path,
) -> MakeConfig:
    """Return a function that makes the configuration of a training of letters, with lines that are added to it."""
    return partial(training_of, model, tmp_path)


def with_paths() -> dict[str, str]:
    """Return an environment in which processes that are started elsewhere find penstock and these tests."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])}
