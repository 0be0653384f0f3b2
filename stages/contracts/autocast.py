"""Autocast: the dtype of a model's safe operations, the same for a trainer and for its samplers."""

from __future__ import annotations

import torch

from ..._pipeline.errors import InvalidConfig


def check_autocast(owner: str, dtype: torch.dtype | None) -> None:
    """Check that a model of float32 can compute in `dtype`.

    Raises:
        InvalidConfig: it is not `torch.bfloat16`, `torch.float16` or None.
    """
    if dtype not in {None, torch.bfloat16, torch.float16}:
        raise InvalidConfig(
            f"{owner}.autocast: expected torch.bfloat16, torch.float16, or None for float32, got {dtype}"
        )


def computing_in(dtype: torch.dtype | None, device: torch.device) -> torch.autocast:
    """Return the context that makes models on `device` compute in `dtype`; None for that of their parameters.

    Enter it for each call: torch keeps cast weights until its end, and a sampler's change between two calls.
    """
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def autocast_on(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the autocast around the caller; None without one."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
