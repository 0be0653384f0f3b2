"""`penstock run` and `penstock check`: a training run from a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .._pipeline.errors import ServerFailed
from .._pipeline.util.printing import print_line

if TYPE_CHECKING:
    from ..runs import RunConfig

CONFIG = Annotated[Path, typer.Argument(help="A YAML file; `penstock init` writes one.")]
OVERRIDES = Annotated[
    list[str] | None, typer.Argument(help="Values that replace those of the file: model.path=./model seed=3")
]


def run(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train as a configuration says; a run whose folder has a checkpoint is continued.

    With placement.trainers it starts the ranks, unless torchrun has started it as one.
    """
    from .._stages.training_run.own_rank import is_rank  # noqa: PLC0415 (not needed for --help)
    from ..runs import load_run_config  # noqa: PLC0415

    if not is_rank():
        print_line(f"reading {config}")
    train_as(load_run_config(config, overrides or ()), ["run", str(config), *(overrides or ())])


def train_as(loaded: RunConfig, command: Sequence[str]) -> None:
    """Train as configured, on all ranks if there are several: `command` of penstock makes each."""
    import anyio  # noqa: PLC0415 (not needed for --help)

    from .._stages.training_run.own_rank import SERVER_DIED, follows, is_rank  # noqa: PLC0415
    from .._stages.training_run.train import run_ranks  # noqa: PLC0415
    from ..runs import train  # noqa: PLC0415

    if loaded.placement.trainers > 1 and not is_rank():
        raise typer.Exit(run_ranks(loaded, ["-m", "penstock", *command]))

    async def trained() -> None:
        summary = await train(loaded)
        if not follows(loaded):
            typer.echo(summary)

    try:
        anyio.run(trained)
    except ServerFailed as error:
        if not is_rank() or not error.was_ready:
            raise
        print_line(str(error))
        raise typer.Exit(SERVER_DIED) from None  # `run_ranks` starts all ranks again


def check(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Build everything that a configuration names but the weights, and print the pipeline and the first prompt."""
    from ..runs import describe_run, load_run_config  # noqa: PLC0415 (not needed for --help)

    typer.echo(describe_run(load_run_config(config, overrides or ())))
