"""The models that are measured, and the size of each measurement."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from penstock import TrainBatch
from penstock.models import HFModel, LoRA

from ..decoder import Size
from ..shapes import SHAPES, make_model
from ..training import make_batch
from .devices import Device

__all__ = ["CASES", "Case", "Load"]


class Case(NamedTuple):
    """A model with random weights."""

    shape: str
    """A key of `SHAPES`."""
    rank: int = 0
    """Rank of adapters beside a base in bfloat16; 0 if all parameters train, in float32."""

    @contextmanager
    def model(self, device: Device, *, narrow: bool = False) -> Iterator[HFModel]:
        """Make the model on the device, with the folder of its configuration; `narrow` for a sampler, in bfloat16."""
        torch.manual_seed(0)
        dtype = torch.bfloat16 if narrow or self.rank else torch.float32
        lora = LoRA(rank=self.rank) if self.rank and not narrow else None
        device.release()
        with TemporaryDirectory() as folder:
            yield make_model(self.shape, Path(folder), str(device.torch), base=dtype, lora=lora)


CASES = {
    "0.5b": Case("qwen2.5-0.5b"),
    "1.5b": Case("qwen2.5-1.5b"),
    "7b-adapters": Case("qwen2.5-7b", rank=16),
    "tiny": Case("tiny"),
    "tiny-adapters": Case("tiny", rank=4),
}
"""By the name of the command line."""


class Load(NamedTuple):
    """The size of each measurement."""

    batch_tokens: int = 65_536
    """Of a step."""
    shortest: int = 256
    longest: int = 2048
    """Tokens of a sequence."""
    rows: int = 64
    """Prompts that are sampled at once."""
    prompt: int = 128
    completion: int = 128
    """Tokens of each."""
    repeats: int = 3
    """Measurements for the median, after one that warms up."""
    golden_steps: int = 120
    """Of the golden run."""

    def batch(self, case: Case) -> TrainBatch:
        """Return the batch of a step: sequences all tokens of which train but the first."""
        size = Size(SHAPES[case.shape]["vocab_size"], layers=0, width=0, heads=0, longest=self.longest)
        return make_batch(size, self.batch_tokens, self.shortest)
