"""The memory that a configured run needs on each device of this host, before a weight is read.

Weights, gradients, moments, a reference and published versions are exact, by the shapes of the model; activations and
the cache of the torch engine are bounds, which short sequences do not reach. See docs/costs.md for the formula.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs

from ..._pipeline.channels.machine_memory import total_bytes
from ..._pipeline.errors import InvalidConfig
from ..._pipeline.view.snapshot import size
from ..models.hf_model import HFModel
from ..models.lora_config import LoRA
from ..training.activation_memory import CHOICES, TOKENS_ON_A_CPU
from .dtypes import base_dtype, reference_dtype, sampled_dtype
from .own_rank import is_rank
from .run_config import RunConfig
from .torch_devices import CONCURRENCY, device_of, max_length_of, sampler_devices

FLOAT32 = 4
"""Bytes of a parameter that trains, and of its gradient; a moment has as many."""

CRITIC = 4 * FLOAT32
"""Bytes of a parameter of a critic: itself, its gradient and two moments."""

BYTES = {"float32": 4, "bfloat16": 2}

STORED, STORED_WIDE = 25, 4
"""Numbers that a layer stores for a token: for each unit of its width, and of its MLP (measured: docs/costs.md)."""

VERSIONS = 2
"""Published versions on a host."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The parameters of a model, and the sizes that its activations depend on."""

    parameters: int
    trained: int
    layers: int
    width: int
    wide: int
    """Width of the MLP."""
    cached: int
    """Numbers of keys and values of a token, in all layers."""


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What a run needs on one device."""

    device: str
    has: int
    """Bytes of a GPU, or of the host."""
    exact: dict[str, int]
    """Bytes by what they are for."""
    bounds: dict[str, int]
    """Those that short sequences do not reach."""

    @property
    def least(self) -> int:
        """Return the bytes that are needed in any case."""
        return sum(self.exact.values())

    def __str__(self) -> str:
        parts = [f"{name} {size(nbytes)}" for name, nbytes in self.exact.items() if nbytes]
        parts += [f"{name} up to {size(nbytes)}" for name, nbytes in self.bounds.items() if nbytes]
        return f"{self.device}, {size(self.has)}: {size(self.least)} at least: {', '.join(parts)}"


def needs_of_run(config: RunConfig, model: HFModel, critic: HFModel | None = None) -> list[DeviceNeeds]:
    """Return what a run needs on each device of this host, with its model and its critic, which may have no weights."""
    return _needs(config, numbers_of(model), _parameters(critic), sharded=is_sharded(config, model, critic))


def is_sharded(config: RunConfig, model: HFModel, critic: HFModel | None = None) -> bool:
    """Return whether each rank has a part of the models: where the whole does not fit beside its moments."""
    if config.placement.trainers == 1 or config.model.lora is not None or config.algorithm.reference.share:
        return False
    return not _fit(_needs(config, numbers_of(model), _parameters(critic), sharded=False))


def _parameters(critic: HFModel | None) -> int:
    """Return the number of parameters of a critic, all of which train; 0 without one."""
    return 0 if critic is None else sum(each.numel() for each in critic.parameters())


def check_memory(
    config: RunConfig, model: HFModel, critic: HFModel | None, make_model: Callable[[RunConfig], HFModel]
) -> None:
    """Compare what a run needs with what each device has.

    Args:
        config: the configuration.
        model: its model, which may be without weights.
        critic: that of the critic, likewise; None in a run without one.
        make_model: returns the model of a configuration, without weights.

    Raises:
        InvalidConfig: a device has less; with its memory, what is needed, and values with which it would fit.
    """
    for each in needs_of_run(config, model, critic):
        if each.least > each.has:
            fits = [
                text for text, smaller in _smaller(config) if _fit(needs_of_run(smaller, make_model(smaller), critic))
            ]
            raise InvalidConfig(
                f"config: expected a run that fits into {each.device}, which has {size(each.has)}, got one that needs "
                f"{size(each.least)}: {', '.join(f'{name} {size(n)}' for name, n in each.exact.items() if n)}; what "
                f"fits: {' or '.join(fits) or 'a smaller model, or a device with more memory'}"
            )


def _fit(needs: Sequence[DeviceNeeds]) -> bool:
    return all(each.least <= each.has for each in needs)


def _smaller(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield values of keys with which the same run needs less memory, each with the whole configuration."""
    if config.model.lora is None:
        model = structs.replace(config.model, lora=LoRA(rank=16), base_dtype="bfloat16")
        yield "model.lora={rank: 16} with model.base_dtype=bfloat16", structs.replace(config, model=model)
    elif config.model.base_dtype != "bfloat16":
        model = structs.replace(config.model, base_dtype="bfloat16")
        yield "model.base_dtype=bfloat16", structs.replace(config, model=model)
    most = torch.cuda.device_count()
    for trainers in range(config.placement.trainers + 1, most + 1):
        placement = structs.replace(config.placement, trainers=trainers, device="")
        yield f"placement.trainers={trainers}", structs.replace(config, placement=placement)


def numbers_of(model: HFModel) -> Numbers:
    """Return the numbers of a model of transformers, which may be without weights."""
    config: Any = model.module.config
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Numbers(
        parameters=sum(each.numel() for each in model.parameters()),
        trained=sum(each.numel() for each in model.parameters() if each.requires_grad),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        wide=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        cached=2 * text.num_hidden_layers * width * heads,
    )


def _needs(config: RunConfig, numbers: Numbers, judging: int, *, sharded: bool) -> list[DeviceNeeds]:
    """Return what a run needs on each device of this host.

    Args:
        config: the configuration.
        numbers: of its model.
        judging: parameters of its critic; 0 without one.
        sharded: whether each rank has a part of the models.
    """
    trains, samples = device_of(config), sampler_devices(config)
    prompts = -(-config.algorithm.prompts // config.placement.samplers)
    rows = min(CONCURRENCY, prompts * config.algorithm.group_size) * max_length_of(config)
    exact: dict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    bounds: dict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for device in _training_devices(config, trains):
        of_device = exact[device]
        parts = config.placement.trainers if sharded else 1
        frozen = numbers.parameters - numbers.trained
        kind = trains.type
        of_device["weights"] += (FLOAT32 * numbers.trained + BYTES[base_dtype(config, kind)] * frozen) // parts
        of_device["gradients"] += FLOAT32 * numbers.trained // parts
        of_device["moments"] += 2 * FLOAT32 * numbers.trained // parts
        of_device["critic"] += CRITIC * judging // parts
        if config.algorithm.kl and config.model.lora is None:
            of_device["reference"] += BYTES[reference_dtype(config, kind)] * numbers.parameters
        bounds[device]["activations"] += _activations(config, numbers, kind)
    sampled = BYTES[sampled_dtype(config, trains.type)]
    for device in samples:
        if device != "cpu" or config.model.lora is not None:  # others map the published weights
            exact[device]["weights of samplers"] += sampled * numbers.parameters
        bounds[device]["cache of samplers"] += sampled * numbers.cached * rows
    exact["cpu"]["published versions"] += VERSIONS * _published(config, numbers, sampled)
    return [
        DeviceNeeds(device, _bytes_of(device), dict(exact[device]), dict(bounds[device]))
        for device in sorted({*exact, *bounds}, reverse=True)
    ]


def _published(config: RunConfig, numbers: Numbers, sampled: int) -> int:
    """Return the bytes of a published version, whose samplers have `sampled` bytes for a parameter."""
    if config.samples_nothing:
        return 0
    if config.engine == "torch":
        return numbers.trained * (FLOAT32 if config.model.lora is not None else sampled)
    return numbers.parameters * (sampled if config.server is None else FLOAT32)  # merged


def _training_devices(config: RunConfig, trains: torch.device) -> list[str]:
    """Return the device of each rank of this host, or of this rank alone."""
    count = int(os.environ["LOCAL_WORLD_SIZE"]) if is_rank() else config.placement.trainers
    if trains.type == "cpu":
        return ["cpu"] * count
    if count == 1 or is_rank():  # a rank has no context on the GPUs of others
        return [str(trains)]
    return [f"cuda:{rank}" for rank in range(min(count, torch.cuda.device_count()))]


def _activations(config: RunConfig, numbers: Numbers, kind: str) -> int:
    """Return the bytes that the layers store for a micro-batch."""
    tokens = config.algorithm.optimizer.micro_batch_tokens
    if tokens == "auto":
        tokens = CHOICES[0] if kind == "cuda" else TOKENS_ON_A_CPU
    if tokens is None:
        tokens = config.algorithm.sequences * max_length_of(config)
    layer = STORED * numbers.width + STORED_WIDE * numbers.wide
    stored = numbers.layers * numbers.width + layer if config.model.gradient_checkpointing else numbers.layers * layer
    return tokens * stored * (FLOAT32 if config.model.precision == "float32" else 2)


def _bytes_of(device: str) -> int:
    """Return the bytes of a device: what is free changes, on a GPU only a process with a context on it knows it."""
    return total_bytes() if device == "cpu" else int(torch.cuda.get_device_properties(device).total_memory)
