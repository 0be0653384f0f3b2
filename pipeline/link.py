"""A link of a chain: a stage, where it runs, and the joint that leads to it; what is known before anything runs.

Also what can be learned of a stage by looking at it: its name, what it sends, and the hints it gives about sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..schemas import TrainBatch, TrajectoryGroup
from .channels.channel import SendChannel
from .processes.placement import Placement, Processes

__all__ = ["Link", "carried", "name_of", "named", "sends"]


@dataclass(frozen=True, slots=True)
class Link:
    """A stage and the joint that leads to it."""

    stage: Any
    """A Source in the first link, a Sink in the last one of a pipeline, a Stage in between."""
    name: str
    on: Placement
    capacity: int | None = None
    """Records in the joint that leads to this stage; None for the default, and in the first link."""
    capacity_bytes: int | None = None

    @property
    def remote(self) -> bool:
        """Whether the stage runs in processes."""
        return isinstance(self.on, Processes)


def name_of(stage: object) -> str:
    """What a stage is called: its class, unless it has a `stage_name`."""
    return str(getattr(stage, "stage_name", type(stage).__name__))


def named(links: Iterable[Link]) -> tuple[Link, ...]:
    """The same links; equal names are told apart by a number."""
    seen: Counter[str] = Counter()
    distinct: list[Link] = []
    for link in links:
        name = name_of(link.stage)
        seen[name] += 1
        numbered = name if seen[name] == 1 else f"{name} {seen[name]}"
        distinct.append(Link(link.stage, numbered, link.on, link.capacity, link.capacity_bytes))
    return tuple(distinct)


def sends(stage: object) -> type[Any] | None:
    """What a stage sends, by the annotation of its `outbox`, or its own word (`sends`); None where neither tells.

    >>> class Doubling:
    ...     async def run(self, outbox: SendChannel[TrainBatch]) -> None: ...
    >>> sends(Doubling())
    <class 'penstock.schemas.batch.TrainBatch'>
    """
    own_word = getattr(stage, "sends", None)
    if isinstance(own_word, type):
        return own_word
    try:
        annotations = get_type_hints(type(stage).run)  # type: ignore[attr-defined]
    except (AttributeError, NameError, TypeError):
        return None
    annotations.pop("return", None)
    for annotation in annotations.values():
        if get_origin(annotation) is SendChannel:
            (record,) = get_args(annotation)
            return record if isinstance(record, type) and not isinstance(record, TypeVar) else None
    return None


def carried(stage: object) -> type[TrajectoryGroup | TrainBatch]:
    """What a channel from `stage` to another process carries: groups, unless it says that it sends batches."""
    return TrainBatch if sends(stage) is TrainBatch else TrajectoryGroup
