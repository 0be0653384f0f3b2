"""`Configuration`: verl's configuration as far as the integration reads it, checked before the flow starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...._pipeline.accounting.telemetry import get_logger
from ...._pipeline.errors import InvalidPipeline
from ...._pipeline.util.json_file import read_json
from ...._pipeline.util.named_objects import import_object
from ..flow_thread.flow_run import Groups
from ..interface import object_in
from .advantages import ESTIMATOR
from .requests import GroupBounds
from .rows import Needs, Row

log = get_logger("penstock.verl")

ROLLOUT = "actor_rollout_ref.rollout"

EARLIER = "resume from an earlier checkpoint (trainer.resume_mode, trainer.resume_from_path)"
"""Remedy of a damaged checkpoint."""

REWARD = "reward"
"""The metric of `algorithm.filter_groups` that is the reward itself."""


class Configuration:
    """A view of verl's configuration, a `DictConfig`."""

    def __init__(self, config: Any) -> None:
        """Read and check.

        Raises:
            InvalidPipeline: it cannot work with a flow; the message has the key to change.
        """
        self._config = config
        self._rollout = config.actor_rollout_ref.rollout
        self._trainer = config.trainer
        self._check()
        self.group_size: int = self._rollout.n
        """Trajectories of a group."""
        self.needs: Needs = Needs(
            temperature=self._rollout.temperature,
            logprobs=self._rollout.calculate_log_probs,
            advantages=config.algorithm.adv_estimator == ESTIMATOR,
        )
        self.keeps_groups: bool = self._mode != "sync"
        """True if checkpoints have the groups in TransferQueue (`_save_checkpoint`, trainer_base.py:1022)."""
        self.limits: GroupBounds = self._limits()

    @property
    def _mode(self) -> str:
        mode: str = self._trainer.v1.trainer_mode
        return mode

    @property
    def per_step(self) -> int | None:
        """The trajectories that each step trains; None if verl takes as many groups as it needs."""
        if self._mode != "sync" or self.limits.filter_metric is not None:
            return None
        return int(self._config.data.train_batch_size) * self.group_size

    def _check(self) -> None:
        if not self._trainer.use_v1:
            raise InvalidPipeline(
                "verl: expected trainer.use_v1=True, got False: the other trainer has no TransferQueue"
            )
        if self._trainer.val_before_train or self._trainer.test_freq > 0:
            raise InvalidPipeline(
                "verl: expected trainer.val_before_train=False and trainer.test_freq=-1, got others: a "
                "flow has prompts of its own; evaluate with penstock.Evaluation"
            )
        if not (self._rollout.get("custom") or {}).get("flow"):
            raise InvalidPipeline(
                f"verl: expected +{ROLLOUT}.custom.flow=module:function, which returns a flow, got none"
            )

    def _limits(self) -> GroupBounds:
        sampler, groups = self._trainer.v1.sampler, self._config.algorithm.get("filter_groups")
        drops = self._mode != "sync" and sampler.max_off_policy_strategy == "drop"
        return GroupBounds(
            max_off_policy_threshold=sampler.max_off_policy_threshold if drops else None,
            filter_metric=str(groups.metric) if groups and groups.enable else None,
        )

    def flow(self) -> Groups:
        """Return the flow of the function that `custom.flow` names, called with verl's configuration.

        Raises:
            InvalidConfig: there is no such function.
            Exception: raised by the function.
        """
        made: Groups = import_object(self._rollout.custom["flow"], f"{ROLLOUT}.custom.flow")(self._config)
        return made

    def metric_of(self, row: Row) -> float:
        """Return the metric for verl's search of groups without a difference."""
        metric = self.limits.filter_metric
        if metric is None or metric == REWARD:
            return float(row.columns["rm_scores"].sum())
        return float(row.values["extra_fields"]["reward_extra_info"].get(metric, float("nan")))

    def resumed(self, name: str) -> tuple[Mapping[str, Any] | None, int]:
        """Return the state in the file `name` of the checkpoint that verl resumes, or None, and its step, or 0."""
        folder = self._resumed_folder()
        if folder is None:
            return None, 0
        step = int(str(folder).rpartition("global_step_")[2])
        if not (folder / name).exists():
            log.warning("resumed_without_ledger", consequence="prompts that were trained may be trained again")
            return None, step
        return read_json(folder / name, dict[str, Any], remedy=EARLIER), step

    def _resumed_folder(self) -> Path | None:
        """Return the folder that `_load_checkpoint` of verl's trainer loads (trainer_base.py:846)."""
        match self._trainer.resume_mode:
            case "auto":
                find = object_in("verl", "verl.utils.checkpoint.checkpoint_manager", "find_latest_ckpt_path")
                found = find(str(Path(self._trainer.default_local_dir).absolute()))
                return None if found is None else Path(found)
            case "resume_path":
                return Path(self._trainer.resume_from_path).absolute()
            case _:
                return None
