"""Messages between an environment's process and its parent, and the errors that they carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from ....._pipeline.errors import InvalidConfig, MissingExtra, PenstockError
from ....._schemas import InvalidRecord, StopReason
from ....contracts.rollouts import RolloutFiltered

LENGTH_BYTES = 4

M = TypeVar("M")


# -- errors ------------------------------------------------------------------------------------------------------------


class ModelCallRefused(PenstockError):
    """An environment called its model in a way that no action can answer; its episode is over."""


class EnvironmentTimedOut(PenstockError):
    """An environment took too long; its work was cancelled, or its process killed."""


class EnvironmentDied(PenstockError):
    """The process of an environment ended; the message has its exit status. The next reset starts another one."""


class EnvironmentRaised(PenstockError):
    """An environment raised; the message has the error, a note its traceback."""


class GroupIncomplete(PenstockError):
    """Not every step-wise environment of a group played its episode to the end."""


class NoMoreItems(PenstockError):
    """An environment has no next item."""


class NotScored(RolloutFiltered):
    """An environment gave an episode no score: environments drop groups that give no gradient."""


class Failure(msgspec.Struct, frozen=True):
    """An error, in the form that the parent receives."""

    kind: str
    """The name of its class."""
    message: str
    traceback: str = ""

    def error(self) -> PenstockError:
        """Return the error; of a class that is not penstock's, an `EnvironmentRaised`."""
        if kind := KNOWN_ERRORS.get(self.kind):
            return kind(self.message)
        raised = EnvironmentRaised(f"{self.kind}: {self.message}".removesuffix(": "))
        raised.add_note(self.traceback)
        return raised


KNOWN_ERRORS: dict[str, type[PenstockError]] = {
    kind.__name__: kind
    for kind in [
        InvalidConfig,
        MissingExtra,
        NotScored,
        *(error for error in PenstockError.__subclasses__() if error.__module__ == __name__),
    ]
}


# -- messages ----------------------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a model call, for callers that know more than its text.

    >>> Action(text="ok", tokens=[111, 107], logprobs=[-0.1, -0.2]).stop_reason.name
    'STOP'
    """

    text: str
    """Without the token that ends it."""
    tokens: Sequence[int] | None = None
    """[C] as they were sampled, the end-of-sequence token included."""
    logprobs: Sequence[float] | None = None
    """[C] of each token."""
    stop_reason: StopReason = StopReason.STOP

    def __post_init__(self) -> None:
        """Check the columns against each other.

        Raises:
            InvalidRecord: log-probabilities without tokens, more or fewer than tokens, or not finite.
        """
        if self.logprobs is None:
            return
        count = 0 if self.tokens is None else len(self.tokens)
        if len(self.logprobs) != count or not np.isfinite(self.logprobs).all():
            raise InvalidRecord(f"logprobs: expected a finite one for each of {count} tokens, got {self.logprobs}")


class EnvConfig(msgspec.Struct, frozen=True):
    """The construction of an environment, and the settings of its episodes; see `AtroposEnvironment`."""

    where: str | Callable[..., Any]
    config: dict[str, Any]
    group_size: int
    turn_timeout_s: float
    setup_timeout_s: float
    python: str | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the parent."""

    id: int
    kind: Literal["ping", "reset", "step", "leave"]
    player: int = 0
    """Number of the step-wise environment."""
    seed: int | None = None
    action: Action | None = None


class StepResult(msgspec.Struct, frozen=True):
    """The outcome of a reset or a step."""

    observation: str
    reward: float = 0.0
    over: bool = False
    info: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True):
    """Answers the request of this id; id 0 reports that the environment is set up, or the failure."""

    id: int
    result: StepResult | None = None
    failure: Failure | None = None


def encode_frame(message: Request | Reply) -> bytes:
    """Return the frame of `message`: its length, and itself as msgpack."""
    encoded = msgspec.msgpack.encode(message, enc_hook=_plain)
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


async def read_frames(reader: asyncio.StreamReader, kind: type[M]) -> AsyncIterator[M]:
    """Yield messages of one kind until the other side closes."""
    decode = msgspec.msgpack.Decoder(kind).decode
    try:
        while True:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
            yield decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return


def _plain(value: Any) -> Any:
    """Return a value of an environment's calls or scores as plain data: pydantic's models, arrays, tensors."""
    for name in ("model_dump", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)()
    return str(value)
