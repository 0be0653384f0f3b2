"""RouteRecorder: the experts that a sampled model chose for each token of each row, prompt and completion.

The token that was drawn last has no record, because the model has not read it. Knows no trainer; see
`contracts/routing.py`.

Axes: b rows, U different prompts, P tokens of the longest one, L layers with experts, E experts a layer chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..._schemas import Array
from ..contracts.routing import Routes, routers_of
from .torch_rows import SampledRow


class RouteRecorder:
    """Records the choices of a model for the rows of a batch, call by call."""

    def __init__(self, model: object) -> None:
        """Record those of `model`.

        Raises:
            InvalidConfig: it has no routers, or some whose choice cannot be recorded.
        """
        self._routers = routers_of(model, "TorchPolicy.routed_experts")
        self._dtype = np.uint8 if self._routers.experts <= 2**8 else np.uint16
        self._routes: Routes

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record a call of the model within the body."""
        with self._routers.using(Routes(None, len(self._routers.layers))) as self._routes:
            yield

    def of_prompts(self, mask: Tensor) -> list[list[Array]]:
        """Return the choices of the last call for each prompt, [T, L, E] of its tokens; `mask` [U, P] has those."""
        recorded, real = self._recorded(mask.numel()).reshape(*mask.shape, *self._shape), mask.cpu().numpy()
        return [[recorded[prompt][real[prompt]]] for prompt in range(len(real))]

    def keep_tokens(self, rows: Sequence[SampledRow], ended: Sequence[bool]) -> None:
        """Store the choices of the last call, of a token of each row [b], in those that had not `ended` before it."""
        recorded = self._recorded(len(rows))
        for number, (row, over) in enumerate(zip(rows, ended, strict=True)):
            if not over:
                row.routes.append(recorded[number : number + 1])

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self._routers.layers), self._routers.chosen

    def _recorded(self, tokens: int) -> Array:
        """Return [tokens, L, E] the choices of the last call."""
        found: Array = self._routes.all.cpu().numpy().astype(self._dtype, copy=False)
        return found.reshape(tokens, *self._shape)


def routes_of(row: SampledRow) -> NDArray[np.uint8] | NDArray[np.uint16] | None:
    """Return [T, L, E] the experts of all tokens of a row that ended, zeros for the last; None without a record."""
    if not row.routes:
        return None
    found = np.concatenate(row.routes)
    return np.concatenate([found, np.zeros_like(found[:1])])
