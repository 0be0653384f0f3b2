"""Memory of the host that a GPU copies into by itself.

Into memory that is not pinned the driver copies through a buffer of its own, page by page, while a core waits.
"""

from __future__ import annotations

from typing import Any

import torch

from .weight_specs import TensorSpec


class PinnedMemory:
    """Memory that is pinned while this exists; where the driver pins none, copies are slower."""

    def __init__(self, whole: torch.Tensor) -> None:
        """Pin `whole` [nbytes] uint8; this takes as long as writing it once."""
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._cudart = cudart
        self._address = whole.data_ptr()
        self._pinned = not int(cudart.cudaHostRegister(self._address, whole.nbytes, 0))
        self._devices: set[torch.device] = set()

    def store(self, target: torch.Tensor, tensor: torch.Tensor, spec: TensorSpec) -> None:
        """Begin to copy `tensor`, of a GPU, to `target` [nbytes] uint8 in this memory, with the dtype of `spec`."""
        if spec.nbytes:
            self._devices.add(tensor.device)
            there = target.view(getattr(torch, spec.dtype)).view(spec.shape)
            there.copy_(tensor.detach(), non_blocking=True)

    def flush(self) -> None:
        """Return when everything is copied."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def close(self) -> None:
        """Unpin the memory once all copies into it are done: a publication that failed may have begun some."""
        self.flush()
        if self._pinned:
            self._cudart.cudaHostUnregister(self._address)
            self._pinned = False
