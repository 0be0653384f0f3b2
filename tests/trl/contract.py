"""The interfaces of TRL 1.16 that penstock implements or uses, as recorded from it; `make test-trl` compares them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

SAMPLE = {
    "prompt": "Messages",
    "completion": "Messages",
    "input_ids": "numpy.ndarray",
    "completion_mask": "numpy.ndarray",
    "old_log_probs": "numpy.ndarray",
    "advantage": "float",
    "model_version": "int",
    "group_id": "int",
    "metrics": "dict[str, float]",
    "enqueued_at": "float | None",
}
"""The fields of RolloutSample."""

WORKER = {
    "check_health": ["stale_after_s"],
    "start": [],
    "stop": [],
    "update_model_version": ["model_version"],
}
"""The methods of RolloutWorkerProtocol with their arguments; it has `rollout_buffer` and `metrics_queue` besides."""

TRANSFER = {"destroy": [], "init_weight_transfer": [], "pause": [], "resume": [], "send_weights": ["iterator"]}
"""The methods of WeightTransferProtocol."""


def methods_of(protocol: Any) -> dict[str, list[str]]:
    """Return the public methods of a class, with the names of their arguments."""
    found = inspect.getmembers(protocol, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters)[1:] for name, method in found if name[0] != "_"}


def fields_of(sample: Any) -> dict[str, str]:
    """Return the fields of a dataclass with their types."""
    named = {"Messages": "Messages", "ndarray": "numpy.ndarray", "float": "float", "int": "int"}
    return {
        field.name: "Messages"
        if str(field.type).startswith("list[dict")
        else named.get(getattr(field.type, "__name__", ""), str(field.type))
        if not str(field.type).startswith("dict")
        else str(field.type)
        for field in dataclasses.fields(sample)
    }
