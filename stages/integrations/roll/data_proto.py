"""ROLL's `DataProto`: tensors, other values, and values of all rows; made in ROLL's processes only."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray


def data_proto(
    columns: Mapping[str, NDArray[Any]], values: Mapping[str, Any] = {}, meta_info: Mapping[str, Any] = {}
) -> Any:
    """Return a `DataProto` of one row: [1, …] of each column, [1] of each other value."""
    torch = import_module("torch")
    tensors = {name: torch.from_numpy(column)[None] for name, column in columns.items()}
    return import_module("roll.distributed.scheduler.protocol").DataProto(
        import_module("tensordict").TensorDict(tensors, batch_size=1),
        {name: np.array([value], dtype=object) for name, value in values.items()},
        meta_info=dict(meta_info),
    )
