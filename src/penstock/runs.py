"""Training runs from a configuration: a model in a folder, a file of questions, a reward."""

from __future__ import annotations

from ._stages.training_run.replay import load_replay_config
from ._stages.training_run.run_config import RunConfig
from ._stages.training_run.train import Summary, describe_run, train
from ._stages.training_run.values import load_run_config

__all__ = ["RunConfig", "Summary", "describe_run", "load_replay_config", "load_run_config", "train"]
