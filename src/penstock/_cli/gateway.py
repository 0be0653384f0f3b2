"""`penstock gateway`: serve environments and trainers that were written for Atropos."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Annotated

import anyio
import typer

from .._stages.http.limits import Limits
from .._stages.integrations.atropos.queue.trajectory_queue import (
    DEFAULT_CAPACITY,
    DEFAULT_CAPACITY_BYTES,
    DEFAULT_HEARTBEAT_TIMEOUT_S,
    TrajectoryQueue,
)
from .._stages.integrations.atropos.server.serve import serve
from .._stages.integrations.atropos.server.server_config import DEFAULT_PORT, ServerConfig
from .._stages.integrations.atropos.server.shm_receiver import CAPACITY_BYTES

LIMITS = Limits()

PORTS = 2**16

GARBAGE = 100_000
"""Objects that are allocated between two garbage collections: the lists of one group, free of cycles."""


def _positive(value: float) -> float:
    if not value > 0:  # nor NaN
        raise typer.BadParameter(f"expected a number above 0, got {value}")
    return value


def gateway(
    *,
    host: Annotated[str, typer.Option(help="Where to listen; beyond loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen; 0 for a free port.", min=0, max=PORTS - 1)] = DEFAULT_PORT,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the secret that clients send; by default PENSTOCK_TOKEN has it.")
    ] = None,
    certfile: Annotated[
        str | None, typer.Option(help="Certificate chain in PEM; with it the gateway speaks https.")
    ] = None,
    keyfile: Annotated[str | None, typer.Option(help="Key of the certificate in PEM, if in a file of its own.")] = None,
    capacity: Annotated[int, typer.Option(help="Groups that may wait.", min=1)] = DEFAULT_CAPACITY,
    capacity_bytes: Annotated[int, typer.Option(help="Bytes of those.", min=1)] = DEFAULT_CAPACITY_BYTES,
    heartbeat_timeout_s: Annotated[
        float,
        typer.Option(help="An environment that sent nothing for so long holds no other back.", callback=_positive),
    ] = DEFAULT_HEARTBEAT_TIMEOUT_S,
    request_bytes: Annotated[int, typer.Option(help="Of one request, as it is sent.", min=1)] = LIMITS.request_bytes,
    inflated_bytes: Annotated[int, typer.Option(help="Of one request, inflated.", min=1)] = LIMITS.inflated_bytes,
    shm_bytes: Annotated[
        int, typer.Option(help="Of shared memory for each environment on this host that sends through it.", min=1)
    ] = CAPACITY_BYTES,
) -> None:
    """Serve environments and trainers that were written for Atropos."""
    limits = Limits(request_bytes=request_bytes, inflated_bytes=inflated_bytes)
    server = ServerConfig(
        host=host,
        port=port,
        token=_token(token_file),
        certfile=certfile,
        keyfile=keyfile,
        limits=limits,
        shm_bytes=shm_bytes,
    )
    queue: TrajectoryQueue[bytes] = TrajectoryQueue(
        capacity=capacity, capacity_bytes=capacity_bytes, heartbeat_timeout_s=heartbeat_timeout_s
    )
    anyio.run(serve, server, queue, _announce)


def _token(file: Path | None) -> str | None:
    """Return the token; a command line would show it to every user of the host."""
    return os.environ.get("PENSTOCK_TOKEN") or None if file is None else file.read_text().strip()


def _announce(url: str) -> None:
    """Print the URL. The process only serves from now on, so its modules are excluded from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    typer.echo(f"listening at {url}")
