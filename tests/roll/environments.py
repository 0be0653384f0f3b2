"""Environments that a configuration of ROLL names."""

from __future__ import annotations

from typing import Any

from penstock.data import Prompt


class Sums:
    """A scored data set."""

    def __init__(self, count: int = 3) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"{index}+1=", "answer": str(index + 1)}

    def score_answer(self, answer: str, entry: Any) -> float:
        return float(answer == entry["answer"])


class Questions:
    """Prompts, with the row that a reward function reads."""

    def prompt(self, number: int) -> Prompt:
        return Prompt(content=f"question {number}", meta={"row": {"answer": str(number)}})


class Tokens:
    """Prompts of tokens."""

    def prompt(self, number: int) -> Prompt:
        return Prompt(content=[number])


class Walk:
    """A step-wise environment."""

    def __init__(self) -> None:
        self.closed = False

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"start {seed}", {"suffix": "s"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return f"after {action}", 0.5, action == "stop", False, {"suffix": "s"}

    def close(self) -> None:
        self.closed = True


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for the right answer: a reward function of TRL's shape, for conversations."""
    return [float(messages[-1]["content"] == true) for messages, true in zip(completions, answer, strict=True)]


def broken(completions: list[str], **_: Any) -> list[float]:
    raise ValueError(f"no reward for {len(completions)}")
