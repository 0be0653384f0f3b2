"""The protocols of stages: objects with one coroutine, `run`. No base class, no registry.

Returning from `run` ends the stream that the stage feeds; raising cancels the pipeline.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from ..channels.channel import ReceiveChannel, SendChannel

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Source(Protocol[Out_co]):
    """The first stage of a pipeline: it only sends."""

    async def run(self, outbox: SendChannel[Out_co], /) -> None:
        """Send records until there are no more."""
        ...


class Stage(Protocol[In_contra, Out_co]):
    """A loop from an inbox to an outbox."""

    async def run(self, inbox: ReceiveChannel[In_contra], outbox: SendChannel[Out_co], /) -> None:
        """Receive until the stream ends; send the resulting records, and `drop` the others."""
        ...


class Sink(Protocol[In_contra]):
    """The last stage of a pipeline: it only receives."""

    async def run(self, inbox: ReceiveChannel[In_contra], /) -> None:
        """Receive until the stream ends."""
        ...
