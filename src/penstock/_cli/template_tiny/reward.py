"""The reward of the completions of one prompt, in the form that TRL's trainers take."""

from __future__ import annotations


def last_letter(completions: list[str], answer: list[str], **_columns: object) -> list[float]:
    """Return 1 for each completion that is the right letter, 0.5 for one that begins with it, and 0 for the others."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if text == right else 0.5 * text.startswith(right) for text, right in pairs]
