"""Samples as text for a terminal: a heading for each, and texts that cannot move the cursor."""

from __future__ import annotations

from ..accounting.sample import Sample
from ..util.printing import printable
from .snapshot import number


def place(sample: Sample) -> str:
    """Return the origin of a sample: `step 20`, or `evaluation of step 20, gsm8k`."""
    if sample.evaluated is None:
        return f"step {sample.step}"
    return f"evaluation of step {sample.evaluated}, {one_line(sample.set)}"


def heading(sample: Sample) -> str:
    """Return the numbers of a sample in a line."""
    facts = [f"reward {number(sample.reward)}"]
    if sample.advantage is not None:
        facts.append(f"advantage {number(sample.advantage)}")
    facts += [f"{name} {number(part)}" for name, part in sample.parts.items()]
    facts += [f"{sample.completion_tokens:,} tokens", sample.stop_reason]
    return ", ".join(facts)


def one_line(text: str) -> str:
    """Return text as one line."""
    return printable(" ".join(text.split()))
