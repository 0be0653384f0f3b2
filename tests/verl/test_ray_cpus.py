"""What verl reserves in Ray is compared with the CPUs that there are, before anything waits for them."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.verl.test_configuration import Node, node

from penstock._stages.integrations.verl.ray_cpus import check_before_waiting, check_cpus, reserved
from penstock.errors import InvalidPipeline

ROOT = Path(__file__).parent.parent.parent


class Queue(Node):
    """The part of a configuration that verl gives to TransferQueue; knows the whole, as in OmegaConf."""

    def _get_root(self) -> Node:
        root: Node = vars(self).get("root", self)
        return root


def config_of(*, units: int = 8, gpus: int = 1, backend: str = "SimpleStorage", name: str = "penstock") -> Node:
    queue = Queue(backend=Node(storage_backend=backend, SimpleStorage=Node(num_data_storage_units=units)))
    config = Node(
        transfer_queue=queue,
        trainer=node(n_gpus_per_node=gpus, nnodes=1),
        actor_rollout_ref=Node(rollout=Node(name=name)),
    )
    vars(queue)["root"] = config
    return config


def test_a_ray_with_fewer_cpus_than_verl_reserves_is_refused_with_what_they_are_for() -> None:
    with pytest.raises(InvalidPipeline, match=r"at least 12 CPUs \(1 for the controller.*8 for its storage.*, got 2,"):
        check_cpus(config_of(), {"CPU": 2.0})
    check_cpus(config_of(), {"CPU": 12.0})


@pytest.mark.parametrize(
    ("options", "cpus"), [({}, 12), ({"units": 1}, 5), ({"gpus": 8}, 33), ({"backend": "MooncakeStore"}, 4)]
)
def test_what_verl_reserves_follows_its_configuration(options: dict[str, Any], cpus: int) -> None:
    assert sum(reserved(config_of(**options)).values()) == cpus


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put a TransferQueue and a Ray of 2 CPUs in the place of those that verl imports; return what was started."""
    calls: list[Any] = []
    queue, ray = ModuleType("transfer_queue"), ModuleType("ray")
    vars(queue)["init"] = lambda conf=None: calls.append(conf)
    vars(ray)["cluster_resources"] = lambda: {"CPU": 2.0}
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    monkeypatch.setitem(sys.modules, "ray", ray)
    check_before_waiting()
    return calls


def test_transfer_queue_is_not_started_where_it_would_wait_for_ever(started: list[Any]) -> None:
    with pytest.raises(InvalidPipeline, match="got 2, and verl would wait for ever"):
        import_module("transfer_queue").init(config_of().transfer_queue)

    assert started == []


@pytest.mark.parametrize("conf", [None, Queue(), config_of(name="vllm").transfer_queue], ids=["none", "alone", "other"])
def test_a_transfer_queue_of_any_other_run_is_started_as_before(started: list[Any], conf: Any) -> None:
    import_module("transfer_queue").init(conf)

    assert started == [conf]


def test_verl_is_named_a_module_that_it_can_import() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]

    assert [import_module(name) is not None for name in points.values()] == [True]
