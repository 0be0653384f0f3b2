"""`each`: a stage made of an async function from one record to another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from ..._schemas.numbers import normalize_counts
from ..channels.channel import ReceiveChannel, SendChannel
from ..errors import InvalidRecord
from ..util.exception_groups import unwrap_single
from ..util.user_code import await_user
from .record_types import function_types
from .stage_info import StageInfo

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Each(Generic[In, Out]):
    """A stage that calls `function` for every record, and sends the results."""

    function: Callable[[In], Awaitable[Out]]
    concurrency: int = 1
    """Calls at a time; above 1, results leave as they become ready."""

    def __post_init__(self) -> None:
        normalize_counts(self, "concurrency")

    @property
    def name(self) -> str:
        """Return the function's name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def stage_info(self) -> StageInfo:
        """State the function's name, and the types of its annotations."""
        received, sent = (known if isinstance(known, type) else None for known in function_types(self.function))
        return StageInfo(name=self.name, receives=received, output_type=sent)

    async def run(self, inbox: ReceiveChannel[In], outbox: SendChannel[Out]) -> None:
        """See `Stage`. A record is received only when a call of `function` can begin with it."""
        with unwrap_single():
            async with anyio.create_task_group() as calls:
                for _ in range(self.concurrency):
                    calls.start_soon(await_user, self._call, inbox, outbox)

    async def _call(self, inbox: ReceiveChannel[In], outbox: SendChannel[Out]) -> None:
        async for record in inbox:
            returned = await await_user(self.function, record)
            if returned is None:
                raise InvalidRecord(
                    f"expected {self.name} to return a record for each that it takes, got None: return the "
                    f"record, or write a stage, which can leave one out with drop(record, 'filtered', reason)"
                )
            await outbox.send(returned)


def each(function: Callable[[In], Awaitable[Out]], *, concurrency: int = 1) -> Each[In, Out]:
    """Return a stage that calls `function` for every record, `concurrency` calls at a time.

    async def shorten(group: TrajectoryGroup) -> TrajectoryGroup: ...

    pipeline = source(SourceEnv(…)).then(each(judge, concurrency=16)).sink(…)

    With one call at a time order is kept; with more, results leave as they become ready. An exception in `function`
    ends the pipeline, with the function's name; so does a function that returns None. To drop records, write a stage.

    Raises:
        InvalidConfig: `concurrency` is no whole number, or below 1.
    """
    return Each(function, concurrency)
