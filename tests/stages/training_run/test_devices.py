"""Trainers, samplers and servers of a configuration get GPUs of their own, where there are enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock._stages.training_run.torch_devices import check_servers, device_of, sampler_devices, server_devices
from penstock.errors import InvalidConfig
from penstock.runs import RunConfig, load_run_config


def placed(**placement: Any) -> RunConfig:
    return load_run_config({"model": {"path": "m"}, "data": {"path": "d"}, "reward": {}, "placement": placement})


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.mark.parametrize(
    ("placement", "devices"),
    [
        ({"trainers": 4, "samplers": 4}, ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]),
        ({"trainers": 7, "samplers": 2}, ["cuda:7", "cuda:7"]),
        ({"trainers": 8, "samplers": 2}, ["cuda:0", "cuda:1"]),
        ({"samplers": 1, "sampler_device": "cuda:5"}, ["cuda:5"]),
        ({"samplers": 2, "device": "cpu"}, ["cpu", "cpu"]),
        ({"servers": {"vllm": 1}}, []),
    ],
)
def test_samplers_share_the_gpus_that_do_not_train(
    placement: dict[str, Any], devices: list[str], eight_gpus: None
) -> None:
    del eight_gpus
    assert sampler_devices(placed(**placement)) == devices


def test_a_rank_trains_on_the_gpu_of_its_place(eight_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del eight_gpus
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert device_of(placed(trainers=4)) == torch.device("cuda:3")
    assert device_of(placed()) == torch.device("cuda:0")  # the variable is of another launcher's


def test_servers_get_the_gpus_behind_those_that_train(eight_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del eight_gpus
    servers = {"vllm": 2, "tensor_parallel": 2}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server_devices(placed(trainers=4, samplers=2, servers=servers)) == ["4,5", "6,7"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert server_devices(placed(trainers=4, samplers=2, servers=servers)) == ["3,2", "1,0"]
    assert server_devices(placed(device="cpu", samplers=2, servers=servers)) == ["7,6", "5,4"]


def test_servers_for_which_there_are_too_few_gpus_are_refused(eight_gpus: None) -> None:
    del eight_gpus
    check_servers(placed(trainers=4, samplers=2, servers={"vllm": 2, "tensor_parallel": 2}))

    with pytest.raises(InvalidConfig, match=r"servers: expected at most 3 GPUs, .* got 2 servers of 2, 4"):
        check_servers(placed(trainers=5, samplers=2, servers={"vllm": 2, "tensor_parallel": 2}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "sglang"}, "placement.servers: expected neither server nor another engine"),
        ({"engine": "vllm", "server": {"url": "http://a:1"}}, "placement.servers: expected neither server nor another"),
        ({"placement": {"samplers": 1, "servers": {"vllm": 2}}}, "samplers: expected at least 2, one for each server"),
        ({"placement": {"servers": {"vllm": 1}, "ray": {}}}, "placement.servers: expected samplers of this host"),
    ],
)
def test_servers_beside_another_engine_are_refused(values: dict[str, Any], message: str) -> None:
    base = {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {}, "placement": {"servers": {"vllm": 1}}}

    with pytest.raises(InvalidConfig, match=message):
        load_run_config(base | values)
