"""The commands of `penstock`."""

from __future__ import annotations

import gc
from typing import Annotated

import anyio
import typer

from .stages.integrations.atropos.queue.environments import DEFAULT_HEARTBEAT_TIMEOUT_S
from .stages.integrations.atropos.queue.room import DEFAULT_CAPACITY, DEFAULT_CAPACITY_BYTES
from .stages.integrations.atropos.queue.trajectory_queue import TrajectoryQueue
from .stages.integrations.atropos.server.bodies import Limits
from .stages.integrations.atropos.server.door import DEFAULT_PORT, Door
from .stages.integrations.atropos.server.standalone import stand
from .stages.integrations.atropos.shm.shm_way_in import CAPACITY_BYTES

__all__ = ["commands"]

LIMITS = Limits()

PORTS = 2**16

GARBAGE = 100_000
"""Objects that are made before garbage is looked for: one group is that many lists, none of which refers to itself."""


def _above_nothing(value: float) -> float:
    if not value > 0:  # nor NaN
        raise typer.BadParameter(f"expected a number above 0, got {value}")
    return value


commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@commands.callback()
def penstock() -> None:
    """Bring trajectories from reinforcement-learning environments to a trainer."""


@commands.command()
def gateway(
    *,
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen; 0 for a free port.", min=0, max=PORTS - 1)] = DEFAULT_PORT,
    token: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_TOKEN", help="What clients have to bring; others can see the option.")
    ] = None,
    capacity: Annotated[int, typer.Option(help="Groups that may wait.", min=1)] = DEFAULT_CAPACITY,
    capacity_bytes: Annotated[int, typer.Option(help="Bytes of those.", min=1)] = DEFAULT_CAPACITY_BYTES,
    heartbeat_timeout_s: Annotated[
        float,
        typer.Option(
            help="An environment that is not heard of for so long holds nobody back.", callback=_above_nothing
        ),
    ] = DEFAULT_HEARTBEAT_TIMEOUT_S,
    request_bytes: Annotated[int, typer.Option(help="Of one request, as it is sent.", min=1)] = LIMITS.request_bytes,
    inflated_bytes: Annotated[int, typer.Option(help="Of one request, inflated.", min=1)] = LIMITS.inflated_bytes,
    shm_bytes: Annotated[
        int, typer.Option(help="Of shared memory for each environment on this host that sends through it.", min=1)
    ] = CAPACITY_BYTES,
    cors: Annotated[bool, typer.Option(help="Let any web page read and write, as the original does.")] = False,
) -> None:
    """Serve environments and trainers that were written for Atropos."""
    limits = Limits(request_bytes=request_bytes, inflated_bytes=inflated_bytes)
    door = Door(host=host, port=port, token=token, limits=limits, shm_bytes=shm_bytes, cors=cors)
    queue: TrajectoryQueue[bytes] = TrajectoryQueue(
        capacity=capacity, capacity_bytes=capacity_bytes, heartbeat_timeout_s=heartbeat_timeout_s
    )
    anyio.run(stand, door, queue, _tell)


def _tell(url: str) -> None:
    """It listens; from now on the process does nothing else, so that its modules need not be looked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    typer.echo(f"listening at {url}")
