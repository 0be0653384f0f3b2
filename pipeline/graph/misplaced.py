"""Refuse invalid arguments of `source`, `then` and `sink`, and give the line to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_origin

from ..channels.channel import ReceiveChannel, SendChannel
from ..errors import InvalidPipeline
from .each import Each
from .placement import Here, Joining, Processes, Ray, processes, ray
from .record_types import annotations_of

Kind: TypeAlias = Literal["source", "stage", "sink"]
"""The kind of a stage, by the ends that its `run` takes."""

ENDS: dict[Kind, tuple[str, ...]] = {"source": ("outbox",), "stage": ("inbox", "outbox"), "sink": ("inbox",)}

CALLS: dict[Kind, str] = {"source": "source(…)", "stage": ".then(…)", "sink": ".sink(…)"}

LINES: dict[tuple[Kind, Kind], str] = {
    ("source", "stage"): "source(…).then({})",
    ("source", "sink"): "source(…).sink({})",
    ("stage", "source"): "source({}) at the beginning",
    ("stage", "sink"): ".sink({})",
    ("sink", "source"): "source({}) at the beginning",
    ("sink", "stage"): ".then({}).sink(…)",
}
"""The line to write, by the kind that is expected and the kind that was given."""

Run = TypeVar("Run", bound=Callable[..., Any])


def written(stage: object) -> str:
    """Return a stage as a chain has it, without its arguments."""
    if isinstance(stage, Each):
        return f"each({stage.name})"
    return f"{stage.__name__ if isinstance(stage, type) else type(stage).__name__}(…)"


def refuse_misplaced_stage(expected: Kind, stage: object) -> None:
    """Refuse a class in place of an instance, and a stage whose `run` takes other ends than those of `expected`.

    Raises:
        InvalidPipeline: with the line to write instead.
    """
    if isinstance(stage, type):
        line = CALLS[expected].replace("…", written(stage))
        raise InvalidPipeline(f"{CALLS[expected]}: expected a {expected}, got the class {stage.__name__}: write {line}")
    run = getattr(stage, "run", None)
    if run is None or _fits(run, expected):
        return
    kind = _kind_of(run)
    if kind is None:
        run_line = f"async def run(self, {', '.join(ENDS[expected])})"
        raise InvalidPipeline(f"{CALLS[expected]}: expected a {expected}, got {stage!r}: write `{run_line}`")
    raise InvalidPipeline(
        f"{CALLS[expected]}: expected a {expected}, got the {kind} {type(stage).__name__}, whose run takes "
        f"({', '.join(ENDS[kind])}): write {LINES[expected, kind].format(written(stage))}"
    )


def _fits(run: Callable[..., Any], expected: Kind) -> bool:
    return _takes(run, ENDS[expected]) and (expected == "stage" or _kind_of_one_end(run) in {expected, None})


def _takes(run: Callable[..., Any], ends: tuple[str, ...]) -> bool:
    try:
        inspect.signature(run).bind(*ends)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def _kind_of(run: Callable[..., Any]) -> Kind | None:
    """Return the kind of a stage that does not fit its place; None for one that fits nowhere."""
    if _takes(run, ENDS["stage"]):
        return "stage"
    return _kind_of_one_end(run) if _takes(run, ENDS["sink"]) else None


def _kind_of_one_end(run: Callable[..., Any]) -> Kind | None:
    """Return "sink" if the first argument of `run` is an inbox, "source" if an outbox, by its annotation or name."""
    name = next(iter(inspect.signature(run).parameters))
    channel = get_origin(annotations_of(run).get(name))
    if channel is ReceiveChannel or name == "inbox":
        return "sink"
    return "source" if channel is SendChannel or name == "outbox" else None


def refuse_unknown_placement(on: object) -> None:
    """Refuse an object that is no placement: `here` without parentheses, a number.

    Raises:
        InvalidPipeline: with the line to write instead.
    """
    if isinstance(on, Here | Processes | Ray | Joining):
        return
    count = 4 if on is processes else on
    line = "ray(workers=4)" if on is ray else f"processes({count})" if type(count) is int else "here()"
    got = on.__name__.lower() if isinstance(on, FunctionType | type) else repr(on)
    raise InvalidPipeline(
        f"on: expected here(), processes(n), ray(workers=n) or joining(expected=n), got {got}: write on={line}"
    )


def ends_in_a_sink(run: Run) -> Run:
    """Refuse a call of `Flow.run` without an outbox: it is meant for `Pipeline.run`. Type checkers refuse it too."""

    @wraps(run)
    async def checked(flow: Any, *args: Any, **options: Any) -> None:
        if len(args) != 1 or options:
            raise InvalidPipeline(
                f"{flow.stage_info().name}: expected a pipeline, got a chain that is open at its end: "
                f"write .sink(SinkTrainer(trainer)).run()"
            )
        await run(flow, *args)

    return cast("Run", checked)
