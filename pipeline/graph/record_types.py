"""The types of the records that a stage receives and sends, read from the annotations of its `run`.

Knows no pipeline. Where an annotation is absent, cannot be evaluated or is `Any`, the type is unknown (None), and
`never_fits` is false: only a certain mismatch is refused.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from numbers import Number
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ..._schemas import TrainBatch, TrajectoryGroup
from ..channels.channel import ReceiveChannel, SendChannel
from .stage_info import info_of


class RecordTypes(NamedTuple):
    """The type that a stage receives and the type that it sends; a TypeVar that is both stands for one type."""

    received: Any = None
    sent: Any = None


def record_types(stage: object) -> RecordTypes:
    """Return the types of `stage`; those in its `stage_info()` take precedence over annotations.

    >>> class Doubling:
    ...     async def run(self, inbox: ReceiveChannel[int], outbox: SendChannel[float]) -> None: ...
    >>> record_types(Doubling())
    RecordTypes(received=<class 'int'>, sent=<class 'float'>)
    """
    known, bound = _records_of_channels(stage), _bound_types(stage)
    info = info_of(stage)
    received = info.receives or _resolved(known.get(ReceiveChannel), bound)
    sent = info.output_type or _resolved(known.get(SendChannel), bound)
    return RecordTypes(received, sent)


def _records_of_channels(stage: object) -> dict[Any, Any]:
    parameters = {parameter.__name__: parameter for parameter in getattr(type(stage), "__parameters__", ())}
    annotations = annotations_of(getattr(type(stage), "run", None), parameters)
    channels = [annotation for annotation in annotations.values() if len(get_args(annotation)) == 1]
    return {get_origin(channel): get_args(channel)[0] for channel in channels}


def annotations_of(function: Any, local: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the annotations of `function` that can be evaluated, each by itself, in their order."""
    function = inspect.unwrap(function) if callable(function) else function
    namespace = getattr(function, "__globals__", {})
    evaluated: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        try:
            evaluated |= get_type_hints(alone, globalns=namespace, localns=local)
        except Exception:  # noqa: BLE001, S112 (an annotation is a caller's code, and may raise anything)
            continue
    return evaluated


def _bound_types(stage: object) -> dict[Any, Any]:
    """Return the types that type variables stand for, in `Tap[int]()` and in a class that inherits from `Tap[int]`."""
    aliases = [base for kind in type(stage).__mro__ for base in kind.__dict__.get("__orig_bases__", ())]
    aliases.append(getattr(stage, "__orig_class__", None))
    bound: dict[Any, Any] = {}
    for alias in aliases:
        bound |= dict(zip(getattr(get_origin(alias), "__parameters__", ()), get_args(alias), strict=False))
    return bound


def _resolved(record: Any, bound: dict[Any, Any]) -> Any:
    """Return the type that `record` stands for, None for `Any`."""
    while record in bound and bound[record] is not record:
        record = bound[record]
    return None if record is Any else record


def never_fits(sent: Any, received: Any) -> bool:
    """Return whether no record of type `sent` is one of type `received`."""
    return not any(_related(one, other) for one in _members(sent) for other in _members(received))


def _members(record: Any) -> tuple[Any, ...]:
    return get_args(record) if get_origin(record) in {Union, types.UnionType} else (record,)


def _related(one: Any, other: Any) -> bool:
    one, other = get_origin(one) or one, get_origin(other) or other
    if Any in (one, other):
        return True
    if not (isinstance(one, type) and isinstance(other, type)):
        return True  # unknown, or a type variable
    try:
        return issubclass(one, other) or issubclass(other, one) or _numeric(one, other)
    except TypeError:  # a protocol that is not runtime-checkable
        return True


def _numeric(*kinds: type) -> bool:
    """Return whether type checkers may take one for the other, as they take an int for a float."""
    return all(issubclass(kind, Number) for kind in kinds)


def type_name(record: Any) -> str:
    """Return the name of a type as it is written."""
    return record.__name__ if isinstance(record, type) else str(record)


def function_types(function: Callable[..., Any]) -> RecordTypes:
    """Return the types of a function of one record: its first argument, and its result."""
    called = function if inspect.isroutine(function) else type(function).__call__
    annotations = annotations_of(called)
    sent = annotations.pop("return", None)
    first = next(iter(_parameters(function)), "")
    return RecordTypes(annotations.get(first), sent)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


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
