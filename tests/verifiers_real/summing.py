"""A taskset of verifiers, found by its name: sums, added by a tool."""

# Its base classes have no types here.
# mypy: ignore-errors
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

TRACES: list[Any] = []
"""Those that were rewarded."""


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @classmethod
    def toolsets(cls, _: Any) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def right(self, trace: Any) -> float:
        TRACES.append(trace)
        return float(trace.last_reply.endswith(f"It is {self.data.answer}."))

    @vf.reward(weight=0.5)
    async def called(self, trace: Any) -> float:
        return float(len(trace.nodes) > 3)

    @vf.metric
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt="2+3 and then 40+2", answer="42"), self.config.task),
            SumTask(SumData(prompt="1+1 and then 9+9", answer="18"), self.config.task),
        ]


__all__ = ["Sums"]


if __name__ == "__main__":  # how verifiers starts the server of the tool
    Adder.run()
