"""Sampling by the engine of `TorchPolicy`, and the publication of a version of a model's weights."""

from __future__ import annotations

import statistics
import time
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from penstock import Worker
from penstock.models import HFModel
from penstock.policies import SamplingParams
from penstock.torch import TorchPolicy
from penstock.weights import WeightPublisher

from ..shapes import SHAPES
from .cases import Case, Load
from .devices import Device

__all__ = ["measure_publication", "measure_sampling"]


def measure_sampling(case: Case, load: Load, device: Device) -> dict[str, Any]:
    """Return tokens a second of completions of one length, by the model in bfloat16.

    The share is that of the memory's bandwidth that reads all weights once for each pass: for few rows a pass is bound
    by it (Pope et al., 2022, arXiv:2211.05102). Keys and values are not counted.
    """
    with case.model(device, narrow=True) as model:
        seconds = anyio.run(_sampled, model, case, load, device)
        read = sum(each.numel() * each.element_size() for each in model.parameters()) * load.completion
        peak_gb = device.peak_gb()
    middle = statistics.median(seconds)
    return {
        "tokens": load.rows * load.completion,
        "batch_s": seconds,
        "tokens_per_s": load.rows * load.completion / middle,
        "share": None if device.sheet is None else read / middle / device.sheet.bytes_per_s,
        "peak_gb": peak_gb,
    }


async def _sampled(model: HFModel, case: Case, load: Load, device: Device) -> list[float]:
    """Return the seconds of each batch, after one that warms up."""
    vocabulary = SHAPES[case.shape]["vocab_size"]
    numbers = np.random.default_rng(0)
    prompts = [*numbers.integers(vocabulary, size=(load.rows, load.prompt), dtype=np.int32)]
    policy = TorchPolicy(lambda: model, eos_id=vocabulary, max_rows=load.rows)  # a token that is never drawn
    took = []
    async with policy.open(Worker()) as engine:
        for _ in range(1 + load.repeats):
            began = time.perf_counter()
            completions = await engine.generate(prompts, SamplingParams(max_completion_tokens=load.completion))
            took.append(time.perf_counter() - began)
            sampled = sum(len(each.tokens) for each in completions)
            if sampled != load.rows * load.completion:
                raise AssertionError(f"expected {load.rows * load.completion} tokens on {device.name}, got {sampled}")
    return took[1:]


def measure_publication(case: Case, load: Load, device: Device) -> dict[str, Any]:
    """Return the seconds of publishing a trainer's weights: in memory of the host, and in that of a GPU by CUDA IPC.

    Adapters are added to their base, as for samplers without. Two versions before those that are measured fill both
    buffers.
    """
    with case.model(device) as model:
        seconds = {"host": anyio.run(_published, model, load, "cpu")}
        if device.is_gpu:
            seconds["device"] = anyio.run(_published, model, load, f"cuda:{device.torch.index or 0}")
        stored = {each.data_ptr(): each.numel() * each.element_size() for each in model.merged().values()}
    gib = sum(stored.values()) / 2**30
    rates = {name: gib / statistics.median(took) for name, took in seconds.items()}
    return {"gib": gib, "publish_s": seconds, "gib_per_s": rates}


async def _published(model: HFModel, load: Load, where: str) -> list[float]:
    took = []
    async with WeightPublisher(model.merged(), device=where) as publisher:
        for version in range(2 + load.repeats):
            began = time.perf_counter()
            await publisher.publish(await anyio.to_thread.run_sync(model.merged), version)
            took.append(time.perf_counter() - began)
    return took[2:]
