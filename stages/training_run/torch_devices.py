"""The devices of a configured run on this host, and the bounds of what it samples there."""

from __future__ import annotations

import os

import torch

from ..._pipeline.errors import InvalidConfig
from .run_config import RunConfig

CONCURRENCY = 256
"""Rollouts at once in a sampling process, or more where a step without lag needs them."""


def max_length_of(config: RunConfig) -> int:
    """Return the most tokens of a sequence."""
    if config.environment is not None and config.environment.max_length is not None:
        return config.environment.max_length
    if config.algorithm.is_supervised:
        return config.data.max_prompt_tokens
    return config.data.max_prompt_tokens + config.sampling.max_completion_tokens


def device_of(config: RunConfig) -> torch.device:
    """Return the device that trains: that of this rank, if there are several."""
    place = os.environ.get("LOCAL_RANK", "0") if config.placement.trainers > 1 else "0"
    return torch.device(config.placement.device or (f"cuda:{place}" if torch.cuda.is_available() else "cpu"))


def _other_gpus(config: RunConfig) -> list[int]:
    """Return the GPUs of this host that do not train."""
    count, trains = torch.cuda.device_count(), device_of(config)
    if trains.type != "cuda":
        return [*range(count)]
    own = range(config.placement.trainers) if config.placement.trainers > 1 else [trains.index or 0]
    return [gpu for gpu in range(count) if gpu not in own]


def sampler_devices(config: RunConfig) -> list[str]:
    """Return the device of each process of this host that samples with the torch engine.

    They share the GPUs that do not train, or, where all do, those.
    """
    placement, trains = config.placement, device_of(config)
    if config.samples_nothing or config.engine != "torch" or placement.ray is not None or placement.joining is not None:
        return []
    if placement.sampler_device or trains.type != "cuda":
        return [placement.sampler_device or str(trains)] * placement.samplers
    gpus = _other_gpus(config) or [*range(torch.cuda.device_count())]
    return [f"cuda:{gpus[place % len(gpus)]}" for place in range(placement.samplers)]


def check_device(key: str, name: str) -> None:
    """Check that torch finds the device that a key of the placement names, if any.

    Raises:
        InvalidConfig: it does not.
    """
    try:
        if name:
            torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        raise InvalidConfig(
            f"config: placement.{key}: expected a device that torch finds here, cpu or cuda:0, got {name!r}: {error}"
        ) from None


def server_devices(config: RunConfig) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each server that the run starts; empty where there is no GPU.

    They get the GPUs that do not train.

    Raises:
        InvalidConfig: there are fewer.
    """
    servers = config.placement.servers
    if servers is None or not (count := torch.cuda.device_count()):
        return []
    gpus, each = _other_gpus(config), servers.tensor_parallel
    if (asked := servers.vllm * each) > len(gpus):
        raise InvalidConfig(
            f"config: placement.servers: expected at most {len(gpus)} GPUs, those of this host that do not train, "
            f"got {servers.vllm} servers of {each}, {asked}"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [",".join(names[gpu] for gpu in gpus[place * each : (place + 1) * each]) for place in range(servers.vllm)]
