"""A step of TRL's GRPOTrainer on the sequences of our step: no generation, and the time of its training alone."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from penstock import TrainBatch
from penstock.models import LoRA

from ..shapes import SHAPES, make_module
from ..trainers import make_tokenizer, trl_trainer
from ..training import GROUP
from .cases import Case, Load
from .devices import Device
from .parts import Skipped

__all__ = ["measure_trl"]


def measure_trl(case: Case, load: Load, device: Device) -> dict[str, Any]:
    """Return tokens a second of TRL's training, with as many sequences in a micro-batch as the device holds.

    TRL gets the tokens by `rollout_func`, and pads each micro-batch to its longest sequence. It computes in bfloat16 by
    autocast and keeps activations, as penstock does here.

    Raises:
        Skipped: TRL is not installed.
    """
    if find_spec("trl") is None:
        raise Skipped("TRL is not installed")
    sequences = GROUP
    while (seconds := _seconds(case, load, device, sequences)) is None and sequences > 1:
        sequences //= 2
    if seconds is None:
        raise Skipped("TRL does not fit into the memory")
    tokens = load.batch(case).tokens.size
    rate = tokens / statistics.median(seconds)
    return {"tokens": tokens, "step_s": seconds, "tokens_per_s": rate, "sequences": sequences}


def _seconds(case: Case, load: Load, device: Device, sequences: int) -> list[float] | None:
    """Return the seconds of each step after the first; None if the device lacks the memory."""
    with TemporaryDirectory() as made:
        try:
            return _trained(case, load, device, sequences, Path(made))
        except torch.OutOfMemoryError:
            return None
        finally:
            gc.collect()


def _trained(case: Case, load: Load, device: Device, sequences: int, folder: Path) -> list[float]:
    device.release()
    batch = load.batch(case)
    dtype = torch.bfloat16 if case.rank else torch.float32
    trainer, _, training = trl_trainer(
        make_module(case.shape, folder, str(device.torch), dtype),
        [{"prompt": "w2"}] * len(batch) * (2 + load.repeats),
        make_tokenizer(folder, SHAPES[case.shape]["vocab_size"]),
        {"rollout_func": _Rollouts(batch), "peft_config": _adapters(case.rank)},
        device.finish,
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=sequences,
        gradient_accumulation_steps=len(batch) // sequences,
        max_completion_length=load.longest,
        max_steps=2 + load.repeats,
        use_cpu=not device.is_gpu,
        bf16=True,
        gradient_checkpointing=False,
    )
    trainer.train()
    return [each.wall for each in training[2:]]


def _adapters(rank: int) -> Any:
    """Return adapters as penstock makes them, for TRL; None for rank 0."""
    if not rank:
        return None
    import peft  # noqa: PLC0415 (a model without adapters does not need it)

    lora = LoRA(rank=rank)
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    return peft.LoraConfig(r=rank, lora_alpha=int(lora.alpha), target_modules=targets, task_type="CAUSAL_LM")


class _Rollouts:
    """Answers TRL with the sequences of a batch, in turn: their first token is the prompt."""

    def __init__(self, batch: TrainBatch) -> None:
        starts = batch.cu_seqlens.tolist()
        self._sequences = [batch.tokens[first:last].tolist() for first, last in pairwise(starts)]

    def __call__(self, prompts: list[Any], _: object) -> Mapping[str, Any]:
        given = [self._sequences[place % len(self._sequences)] for place in range(len(prompts))]
        return {
            "prompt_ids": [each[:1] for each in given],
            "completion_ids": [each[1:] for each in given],
            "logprobs": [[0.0] * (len(each) - 1) for each in given],
        }
