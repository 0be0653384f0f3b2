"""`penstock worker`: join a pipeline that runs on another host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._pipeline.workers.join import DRAIN_TIMEOUT_S, default_name, join, key_of, program_in
from .run import OVERRIDES

PROGRAM = Annotated[
    str, typer.Argument(help="What the pipeline runs too: its configuration, or its script: train.py:sampler.")
]


def worker(
    program: PROGRAM,
    overrides: OVERRIDES = None,
    *,
    join_url: Annotated[str, typer.Option("--join", help="Where the pipeline listens: tcp://HOST:5555.")],
    key: Annotated[Path | None, typer.Option(help="Its key file; by default the key of this user.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this worker; by default its host and process id.")] = None,
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds after SIGTERM in which it completes what it has begun.", min=0)
    ] = DRAIN_TIMEOUT_S,
) -> None:
    """Sample for a run on another host: join it, and leave when it is done, or at SIGTERM."""
    import anyio  # noqa: PLC0415 (not needed for --help)

    if program.endswith(".py") or ".py:" in program:
        runs = program_in(program)
    else:
        from .._stages.training_run.train import sampler_program  # noqa: PLC0415 (not needed for --help)
        from ..runs import load_run_config  # noqa: PLC0415

        runs = sampler_program(load_run_config(Path(program), overrides or ()))

    async def joined() -> None:
        found = await anyio.to_thread.run_sync(key_of, str(key or ""))
        await join(join_url, runs, key=found, name=name or default_name(), drain_timeout_s=drain_timeout_s, tell=_tell)

    anyio.run(joined)


def _tell(line: str) -> None:
    typer.echo(f"penstock: {line}", err=True)
