"""Tensors of a version of weights, of every size and dtype that models have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LARGE = 32 * 2**20 // 4


def tensors(version: int, device: torch.device | str) -> dict[str, Tensor]:
    """Return [LARGE] float32, [129, 65] bfloat16, [7] float16, an int64 and an empty tensor, filled by `version`."""
    generator = torch.Generator().manual_seed(version)
    whole = torch.randn(LARGE, generator=generator)
    return {
        "large": whole.to(device),
        "odd": whole[: 129 * 65].view(129, 65).to(device, torch.bfloat16),
        "small": whole[-7:].to(device, torch.float16),
        "count": torch.tensor(version, device=device),
        "empty": torch.zeros(0, 3, device=device),
    }


class Model(nn.Module):
    """A module with these tensors on `device`."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        for name, tensor in tensors(0, device).items():
            self.register_buffer(name, tensor)
