"""The reward of the completions of one prompt, in the form that TRL's trainers take."""

from __future__ import annotations

import re


def correct(completions: list[str], answer: list[int], **_columns: object) -> list[float]:
    """Return 1 for each completion whose last number is the answer, and 0 for the others."""
    return [float(last_number(text) == str(right)) for text, right in zip(completions, answer, strict=True)]


def last_number(text: str) -> str | None:
    """Return the last whole number in a text, without commas; None if there is none."""
    numbers = re.findall(r"-?\d[\d,]*", text)
    return numbers[-1].replace(",", "") if numbers else None
