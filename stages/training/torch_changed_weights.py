"""The share of the weights that a step changed, measured on a few: an update may be lost in rounding.

Knows no optimizer, schedule or dtype: it compares the weights before a step with those after it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.torch_sharding import local

TENSORS, VALUES = 16, 256
"""Tensors, evenly spread over the model, and values of each that are compared: 17 small kernels, whatever its size."""


class ChangedWeights:
    """Compares a few weights before and after a step.

    Args:
        parameters: that train; of sharded ones, the part of this rank is compared.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        every = max(1, len(parameters) // TENSORS)
        self._parameters = parameters[::every][:TENSORS]
        self._before = self._taken()

    @torch.no_grad()
    def share(self) -> float:
        """Return the share of these weights that differs from that at construction. Waits for the device."""
        if not len(self._before):
            return 0.0
        return (self._taken() != self._before).float().mean().item()

    @torch.no_grad()
    def _taken(self) -> Tensor:
        """Return [≤ TENSORS · VALUES] a copy of the weights that are compared."""
        return torch.cat([_some(local(parameter)) for parameter in self._parameters])


def _some(tensor: Tensor) -> Tensor:
    """Return [≤ VALUES] values that are evenly spread over a tensor, as float32."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // VALUES)][:VALUES].float()
