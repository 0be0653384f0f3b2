"""`penstock run` and `penstock check`: a training run from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._pipeline.util.printing import print_line

CONFIG = Annotated[Path, typer.Argument(help="A YAML file; `penstock init` writes one.")]
OVERRIDES = Annotated[
    list[str] | None, typer.Argument(help="Values that replace those of the file: model.path=./model seed=3")
]


def run(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Train as a configuration says; a run whose folder has a checkpoint is continued."""
    print_line(f"reading {config}")
    import anyio  # noqa: PLC0415 (not needed for --help)

    from ..runs import load_run_config, train  # noqa: PLC0415

    loaded = load_run_config(config, overrides or ())

    async def trained() -> None:
        typer.echo(await train(loaded))

    anyio.run(trained)


def check(config: CONFIG, overrides: OVERRIDES = None) -> None:
    """Build everything that a configuration names but the weights, and print the pipeline and the first prompt."""
    from ..runs import describe_run, load_run_config  # noqa: PLC0415 (not needed for --help)

    typer.echo(describe_run(load_run_config(config, overrides or ())))
