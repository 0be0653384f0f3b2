"""What cannot work is refused before the flow starts, with the key of verl's configuration to change."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from penstock._stages.integrations.verl.configuration import Configuration
from penstock._stages.integrations.verl.requests import GroupBounds
from penstock.errors import InvalidConfig, InvalidPipeline, MissingExtra
from penstock.integrations.verl import PenstockCheckpoint, PenstockLoopManager


class Node(dict[str, Any]):
    """A part of a configuration, as OmegaConf has them: read by attribute, or as a mapping."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def node(**values: Any) -> Node:
    return Node({name: Node(value) if isinstance(value, dict) else value for name, value in values.items()})


def config_of(
    *, rollout: Node | None = None, trainer: Node | None = None, sampler: Node | None = None, **algorithm: Any
) -> Node:
    given = Node({"n": 2, "temperature": 1.0, "calculate_log_probs": True, "custom": Node(flow="math:sqrt")})
    sampling = Node({"max_off_policy_threshold": 8, "max_off_policy_strategy": "drop"} | (sampler or {}))
    training = node(use_v1=True, val_before_train=False, test_freq=-1, resume_mode="disable")
    training["v1"] = Node(trainer_mode="sync", sampler=sampling)
    return Node(
        actor_rollout_ref=Node(rollout=Node(given | (rollout or {}))),
        trainer=Node(training | (trainer or {})),
        algorithm=node(adv_estimator="grpo", **algorithm),
    )


def test_a_trainer_without_transfer_queue_is_refused() -> None:
    with pytest.raises(InvalidPipeline, match=r"trainer\.use_v1=True"):
        Configuration(config_of(trainer=node(use_v1=False)))


@pytest.mark.parametrize("validates", [{"val_before_train": True}, {"test_freq": 5}])
def test_a_trainer_that_validates_is_refused(validates: dict[str, Any]) -> None:
    with pytest.raises(InvalidPipeline, match=r"val_before_train=False and trainer\.test_freq=-1"):
        Configuration(config_of(trainer=node(**validates)))


@pytest.mark.parametrize("custom", [None, Node(), Node(flow=None)])
def test_a_configuration_without_a_flow_is_refused(custom: Any) -> None:
    with pytest.raises(InvalidPipeline, match=r"\+actor_rollout_ref\.rollout\.custom\.flow=module:function"):
        Configuration(config_of(rollout=Node(custom=custom)))


def test_a_flow_that_cannot_be_imported_is_refused_by_its_key() -> None:
    config = config_of(rollout=Node(custom=Node(flow="math:no_such")))

    with pytest.raises(InvalidConfig, match=r"actor_rollout_ref\.rollout\.custom\.flow: expected a name in math"):
        Configuration(config).flow()


def test_only_an_asynchronous_trainer_that_drops_has_a_bound_of_age() -> None:
    sync = Configuration(config_of())
    dropping = config_of()
    dropping.trainer.v1["trainer_mode"] = "separate_async"
    waiting = config_of(sampler=Node(max_off_policy_strategy="wait"))
    waiting.trainer.v1["trainer_mode"] = "separate_async"

    assert sync.limits == GroupBounds()
    assert Configuration(dropping).limits == GroupBounds(max_off_policy_threshold=8)
    assert Configuration(waiting).limits == GroupBounds()
    assert [Configuration(each).keeps_groups for each in (dropping, waiting)] == [True, True]
    assert not sync.keeps_groups


def test_groups_are_filtered_by_the_metric_of_the_configuration() -> None:
    config = config_of(filter_groups={"enable": True, "metric": "exact"})

    assert Configuration(config).limits == GroupBounds(filter_metric="exact")
    assert Configuration(config_of(filter_groups={"enable": False, "metric": "exact"})).limits == GroupBounds()


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_without_verl_the_command_that_installs_it_is_named() -> None:
    with pytest.raises(MissingExtra, match=r"pip install .*\[verl\]'"):
        PenstockLoopManager.create(config=config_of())


def test_a_checkpoint_of_a_trainer_with_another_manager_is_refused(tmp_path: Any) -> None:
    with pytest.raises(InvalidPipeline, match="expected a trainer with PenstockLoopManager, got Node"):
        PenstockCheckpoint(config_of()).on_save(Node(agent_loop_manager=Node()), 3, str(tmp_path))
