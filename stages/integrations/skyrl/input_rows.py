"""The rows of SkyRL's `GeneratorInput`. Those that are repetitions of one prompt share a request.

Read off skyrl 0.4.0: train/generators/base.py:37 (the keys). Knows no SkyRL: the input is a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...._pipeline.errors import InvalidPipeline
from ...data.plain_values import plain_row
from .requests import PromptRequest
from .samples import Asked
from .sampling_params import sampling_of

Key: TypeAlias = tuple[str, int]
"""SkyRL's `instance_id` and `repetition_id`. It asks for the same ones again in a later epoch."""


def asked_of(input_batch: Mapping[str, Any], tokens_of: Callable[[Any], NDArray[np.int32]]) -> list[Asked]:
    """Return the rows of SkyRL's input; `tokens_of` returns the tokens of a prompt's messages.

    Raises:
        InvalidPipeline: two rows have one `trajectory_id`.
    """
    prompts, ids = input_batch["prompts"], input_batch.get("trajectory_ids")
    keys = [(str(place), 0) for place in range(len(prompts))] if ids is None else keys_of(ids)
    if len(set(keys)) < len(keys):
        raise InvalidPipeline(f"SkyRL: expected every trajectory_id once in a batch, got {len(keys)} with copies")
    places: dict[str, list[int]] = {}
    for place, (instance_id, _) in enumerate(keys):
        places.setdefault(instance_id, []).append(place)
    sampling = sampling_of(input_batch.get("sampling_params") or {})
    requests = {
        each: PromptRequest(
            each, tokens_of(prompts[at[0]]), tuple(keys[place][1] for place in at), sampling, _meta(input_batch, at[0])
        )
        for each, at in places.items()
    }
    return [Asked(requests[instance_id], repetition) for instance_id, repetition in keys]


def keys_of(trajectory_ids: Sequence[Any]) -> list[Key]:
    """Return the names of SkyRL's `TrajectoryID`s."""
    return [(str(each.instance_id), int(each.repetition_id)) for each in trajectory_ids]


def is_evaluation(input_batch: Mapping[str, Any]) -> bool:
    """Return whether SkyRL evaluates."""
    metadata = input_batch.get("batch_metadata")
    return metadata is not None and metadata.training_phase == "eval"


def _meta(input_batch: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return the `meta` of a request: values for rewards, under the names of a `PromptDataset`."""
    extras = input_batch.get("env_extras")
    row = plain_row(extras[place] if extras is not None else {}, lambda: f"env_extras[{place}]")
    env_class = input_batch["env_classes"][place]
    messages = json.loads(json.dumps(input_batch["prompts"][place]))
    return {"row": row, "messages": messages, "data_source": row.get("data_source") or env_class}
