"""The record types of a stage are read from the annotations of its `run`; without an annotation they are unknown."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import pytest

import penstock
from penstock import ReceiveChannel, SendChannel, TrainBatch, TrajectoryGroup, each, source
from penstock._pipeline.graph.record_types import RecordTypes, never_fits, record_types
from penstock._stages.integrations import atropos

T = TypeVar("T")


class Groups:
    async def run(self, outbox: SendChannel[TrajectoryGroup]) -> None: ...


class Pack:
    async def run(self, inbox: ReceiveChannel[TrajectoryGroup], outbox: SendChannel[TrainBatch]) -> None: ...


class Train:
    async def run(self, inbox: ReceiveChannel[TrainBatch]) -> None: ...


class Untyped:
    async def run(self, inbox, outbox): ...  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201


class Half:
    async def run(self, inbox: ReceiveChannel[Nowhere], outbox: SendChannel[TrainBatch]) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Anything:
    async def run(self, inbox: ReceiveChannel[Any], outbox: SendChannel[Any]) -> None: ...


class Tap(Generic[T]):
    async def run(self, inbox: ReceiveChannel[T], outbox: SendChannel[T]) -> None: ...


class TapOfBatches(Tap[TrainBatch]):
    pass


async def judge(group: TrajectoryGroup, strictness: float = 1.0) -> TrajectoryGroup:
    return group.with_rewards(group.rewards * strictness)


class Judge:
    strictness: float = 1.0

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup:
        return group

    async def pack(self, group: TrajectoryGroup) -> TrainBatch:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("stage", "received", "sent"),
    [
        (Groups(), None, TrajectoryGroup),
        (Pack(), TrajectoryGroup, TrainBatch),
        (Train(), TrainBatch, None),
        (Untyped(), None, None),
        (Half(), None, TrainBatch),
        (Anything(), None, None),
        (Tap(), T, T),
        (TapOfBatches(), TrainBatch, TrainBatch),
        (each(judge), TrajectoryGroup, TrajectoryGroup),
        (each(Judge()), TrajectoryGroup, TrajectoryGroup),
        (each(Judge().pack), TrajectoryGroup, TrainBatch),
        (each(partial(judge, strictness=0.5)), None, None),
        (source(Groups()).then(Pack()), None, TrainBatch),
        (source(Groups()).then(Tap()), None, TrajectoryGroup),
        (object(), None, None),
    ],
)
def test_the_record_types_of_a_stage_are_those_of_its_annotations(
    stage: object, received: object, sent: object
) -> None:
    known = record_types(stage)

    assert (_known(known.received), _known(known.sent)) == (received, sent)


def _known(record: object) -> object:
    """Return None for a type variable of `Each` or `Flow`, which is unknown."""
    return None if isinstance(record, TypeVar) and record is not T else record


def test_a_generic_stage_has_the_type_of_its_parameter() -> None:
    assert record_types(Tap[TrainBatch]()) == RecordTypes(TrainBatch, TrainBatch)


class Sized(Protocol):
    nbytes: int


@pytest.mark.parametrize(
    ("sent", "received", "never"),
    [
        (TrajectoryGroup, TrajectoryGroup, False),
        (TrainBatch, TrajectoryGroup, True),
        (TrainBatch, object, False),
        (object, TrainBatch, False),
        (TrainBatch, TrajectoryGroup | TrainBatch, False),
        (TrajectoryGroup | TrainBatch, TrainBatch, False),
        (TrajectoryGroup | None, TrainBatch, True),
        (list[int], list[str], False),
        (list[int], dict[str, int], True),
        (int, float, False),
        (int, str, True),
        (type(None), TrajectoryGroup, True),
        (TrainBatch, Sized, False),
        (TrainBatch, None, False),
        (None, TrainBatch, False),
        (T, TrainBatch, False),
        (Any, TrainBatch, False),
    ],
)
def test_only_types_that_certainly_differ_do_not_fit(sent: object, received: object, never: bool) -> None:  # noqa: FBT001
    assert never_fits(sent, received) is never


def stages() -> list[type]:
    kinds = [getattr(module, name) for module in (penstock, atropos) for name in module.__all__]
    return [kind for kind in kinds if inspect.isclass(kind) and _runs_records(kind)]


def _runs_records(kind: type) -> bool:
    run: Callable[..., Any] | None = getattr(kind, "run", None)
    ends = {"inbox", "outbox"} & set(inspect.signature(run).parameters) if run is not None else set()
    return bool(ends) and not getattr(kind, "_is_protocol", False) and kind is not penstock.Flow


@pytest.mark.parametrize("kind", stages(), ids=lambda kind: kind.__name__)
def test_every_built_in_stage_has_annotations_of_its_records(kind: type) -> None:
    known = record_types(type("Stage", (), {"run": vars(kind)["run"]})())

    ends = inspect.signature(kind.run).parameters  # type: ignore[attr-defined]
    assert ("inbox" in ends, "outbox" in ends) == (known.received is not None, known.sent is not None)
