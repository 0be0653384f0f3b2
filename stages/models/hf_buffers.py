"""Buffers of a model of transformers on the meta device, computed as transformers does where it loads a model.

A module computes most of its buffers from its own arguments; see `MetaMaterializer`. Some are set by a module above it
(the multipliers of Falcon-H1), whose `_init_weights` sets them again.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._pipeline.weights.meta_model import MetaMaterializer


def compute_buffers(module: Any) -> None:
    """Compute the floating-point buffers of `module` that no module of it computes alone; others stay on meta."""
    computed = MetaMaterializer(module, "cpu").buffers
    owned = [(owner, name) for (owner, name), found in computed.items() if found is None and name in owner._buffers]  # noqa: SLF001 (torch has no public function for it)
    left = {(owner, name): getattr(owner, name) for owner, name in owned}
    for (owner, name), buffer in left.items():
        setattr(owner, name, torch.full_like(buffer, torch.nan, device="cpu"))
    if left:
        for each in module.modules():
            module._init_weights(each)  # noqa: SLF001 (there is no public name)
    for (owner, name), buffer in left.items():
        if getattr(owner, name).isnan().any():
            setattr(owner, name, buffer)
