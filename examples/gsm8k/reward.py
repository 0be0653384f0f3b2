"""Rewards of answers in GSM8K's format, which end in `#### n`: in TRL's form and in verl's."""

from __future__ import annotations

import re

__all__ = ["compute_score", "correct"]


def correct(completions: list[str], answer: list[str], **_columns: object) -> list[float]:
    """Return 1 for each completion that ends in the right number, and 0 for the others; a function for TRL."""
    return [float(_number(text) == _number(right)) for text, right in zip(completions, answer, strict=True)]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:  # noqa: ARG001
    """Return the same for one completion; a function for verl."""
    return float(_number(solution_str) == _number(ground_truth))


def _number(text: str) -> float | None:
    """Return the number behind the last `####`, or the last number where there is no `####`; None if there is none."""
    _, _, answer = text.rpartition("####")
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    return float(numbers[-1].replace(",", "")) if numbers else None
