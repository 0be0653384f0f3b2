"""A node of a chain: a stage, where it runs, and the edge that leads to it; what is known before anything runs.

Also what can be learned of a stage by looking at it: its name, what it sends, and the hints it gives about sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ..schemas import TrainBatch, TrajectoryGroup
from ..schemas.errors import InvalidConfig
from ..schemas.numbers import whole_number
from .processes.placement import Placement, Processes
from .record_types import RecordTypes, record_types
from .stage_info import info_of

__all__ = ["StageNode", "name_of", "named", "output_type", "sent_along", "wire_type"]


@dataclass(frozen=True, slots=True)
class StageNode:
    """A stage and the edge that leads to it."""

    stage: Any
    """A Source in the first node, a Sink in the last one of a pipeline, a Stage in between."""
    name: str
    on: Placement
    capacity: int | None = None
    """Records in the edge that leads to this stage; None for the default, and in the first node."""
    capacity_bytes: int | None = None

    def __post_init__(self) -> None:
        """Convert the capacities that are whole numbers; `check()` refuses the others by name."""
        for name in ("capacity", "capacity_bytes"):
            if (value := getattr(self, name)) is not None:
                with suppress(InvalidConfig):
                    object.__setattr__(self, name, whole_number(name, value))

    @property
    def remote(self) -> bool:
        """Whether the stage runs in processes."""
        return isinstance(self.on, Processes)


def name_of(stage: object) -> str:
    """Return the name that a stage states, or that of its class."""
    return info_of(stage).name or type(stage).__name__


def named(nodes: Iterable[StageNode]) -> tuple[StageNode, ...]:
    """The same links; equal names are told apart by a number."""
    seen: Counter[str] = Counter()
    distinct: list[StageNode] = []
    for node in nodes:
        name = name_of(node.stage)
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} {seen[name]}"
        distinct.append(StageNode(node.stage, numbered, node.on, node.capacity, node.capacity_bytes))
    return tuple(distinct)


def output_type(stage: object) -> type[Any] | None:
    """Return the class of what a stage sends; None where nothing tells it, or it is one of several."""
    return _class(record_types(stage).sent)


def sent_along(stages: Iterable[RecordTypes]) -> list[Any]:
    """Return the type that each stage of a chain sends; one that hands on what it receives sends the type before it."""
    sent: list[Any] = []
    for known in stages:
        hands_on = isinstance(known.sent, TypeVar) and known.sent is known.received and sent
        sent.append(sent[-1] if hands_on else known.sent)
    return sent


def _class(record: Any) -> type[Any] | None:
    return record if isinstance(record, type) else None


def wire_type(stage: object) -> type[TrajectoryGroup | TrainBatch]:
    """What a channel from `stage` to another process carries: groups, unless it says that it sends batches."""
    return TrainBatch if output_type(stage) is TrainBatch else TrajectoryGroup
