"""A node of a chain: a stage, its placement, and the edge that leads to it.

Also functions that read the name of a stage and the type of the records that it sends, without running it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ..._schemas import TrainBatch, TrajectoryGroup
from ..._schemas.errors import InvalidConfig
from ..._schemas.numbers import whole_number
from .placement import Here, Placement
from .record_types import RecordTypes, record_types
from .stage_info import info_of


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
        """Return whether the stage runs in workers: processes, or actors of Ray."""
        return not isinstance(self.on, Here)


def name_of(stage: object) -> str:
    """Return the name that a stage states, or that of its class."""
    return info_of(stage).name or type(stage).__name__


def named(nodes: Iterable[StageNode]) -> tuple[StageNode, ...]:
    """Return the same nodes, with a number appended to names that occur more than once."""
    seen: Counter[str] = Counter()
    distinct: list[StageNode] = []
    for node in nodes:
        name = name_of(node.stage)
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} {seen[name]}"
        distinct.append(StageNode(node.stage, numbered, node.on, node.capacity, node.capacity_bytes))
    return tuple(distinct)


def output_type(stage: object) -> type[Any] | None:
    """Return the class of the records that a stage sends; None where it is unknown, or one of several."""
    sent = record_types(stage).sent
    return sent if isinstance(sent, type) else None


def sent_along(stages: Iterable[RecordTypes]) -> list[Any]:
    """Return the type that each stage of a chain sends; a stage that forwards its records sends the type before it."""
    sent: list[Any] = []
    for known in stages:
        forwards = isinstance(known.sent, TypeVar) and known.sent is known.received and sent
        sent.append(sent[-1] if forwards else known.sent)
    return sent


def wire_type(stage: object) -> type[TrajectoryGroup | TrainBatch]:
    """Return the record type of a channel from `stage` to another process: groups, unless it declares batches."""
    return TrainBatch if output_type(stage) is TrainBatch else TrajectoryGroup
