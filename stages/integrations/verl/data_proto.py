"""Groups as the columns of verl's `DataProto`, padded: prompts at the left, responses at the right.

Read off verl 0.9.1: `AgentLoopWorker._agent_loop_postprocess` and `_postprocess` (experimental/agent_loop/
agent_loop.py). Lengths: B sequences, P and R tokens of the padded prompts and responses. Knows no verl, and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .rows import Row

OF_RESPONSES = ("responses", "response_mask", "rm_scores", "rollout_log_probs", "advantages")


class Shape(NamedTuple):
    """The lengths of padded sequences."""

    prompt_length: int
    """P."""
    response_length: int
    """R."""
    pad_token_id: int = 0

    def fits(self, row: Row) -> bool:
        """Return whether neither the prompt nor the response is longer."""
        return bool(row.tag["prompt_len"] <= self.prompt_length and row.tag["response_len"] <= self.response_length)


def padded(rows: Sequence[Row], shape: Shape) -> dict[str, NDArray[Any]]:
    """Return the columns over tokens: [B, P], [B, R] or [B, P + R].

    Args:
        rows: of the batch; `rollout_log_probs` and `advantages` are columns where all rows have them.
        shape: all rows fit into it.
    """
    have = [name for name in OF_RESPONSES if all(name in row.columns for row in rows)]
    columns = {name: _right([row.columns[name] for row in rows], shape.response_length) for name in have}
    columns["prompts"] = _right([row.columns["prompts"][::-1] for row in rows], shape.prompt_length)[:, ::-1]
    ones = [np.ones(row.tag["prompt_len"], np.int64) for row in rows]
    of_prompts = _right(ones, shape.prompt_length)[:, ::-1]
    of_responses = _right([np.ones(row.tag["response_len"], np.int64) for row in rows], shape.response_length)
    for name, mask in (("prompts", of_prompts), ("responses", of_responses)):
        columns[name] = np.where(mask == 1, columns[name], shape.pad_token_id)
    columns["input_ids"] = np.concatenate([columns["prompts"], columns["responses"]], 1)
    columns["attention_mask"] = np.concatenate([of_prompts, of_responses], 1)
    columns["position_ids"] = np.maximum(columns["attention_mask"].cumsum(1) - 1, 0)
    if "advantages" in columns:
        columns["returns"] = columns["advantages"].copy()
    return columns


def unpadded(rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """Return the columns over sequences, [B]: the group, the turns, and the fields that verl keeps beside tensors."""
    fields = [row.values["extra_fields"] for row in rows]
    kept = ("turn_scores", "tool_rewards", "min_global_steps", "max_global_steps", "trajectory")
    columns = {name: _objects([of_row[name] for of_row in fields]) for name in kept}
    parts = sorted(set.intersection(*(set(of_row["reward_extra_info"]) for of_row in fields)))
    columns |= {name: np.array([of_row["reward_extra_info"][name] for of_row in fields]) for name in parts}
    columns["uid"] = _objects([f"{row.trajectory.env}/{row.trajectory.instance_id}" for row in rows])
    columns["__num_turns__"] = np.array([row.values["num_turns"] for row in rows], np.int32)
    return columns


def _right(rows: list[NDArray[Any]], width: int) -> NDArray[Any]:
    """Return [B, width] the rows, followed by zeros."""
    filled = np.zeros((len(rows), width), rows[0].dtype)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return filled


def _objects(values: list[Any]) -> NDArray[Any]:
    """Return [B] an array of objects, also if they have shapes of their own."""
    column = np.empty(len(values), object)
    column[:] = values
    return column
