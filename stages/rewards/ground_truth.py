"""The right answer of a row, in the columns where data sets have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ground_truth(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the right answer as `ground_truth`; empty if the row has none.

    It is the one of the column `reward_model`, as in verl's files, or else the column `ground_truth` or `answer`.

    >>> ground_truth({"question": "3+4=", "answer": 7})
    {'ground_truth': 7}
    """
    for columns in (row.get("reward_model"), row, {"ground_truth": row["answer"]} if "answer" in row else {}):
        if isinstance(columns, Mapping) and "ground_truth" in columns:
            return {"ground_truth": columns["ground_truth"]}
    return {}
