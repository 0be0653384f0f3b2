"""`penstock launch`: a gateway, environments of Atropos and their trainer, by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from .._pipeline.util.printing import print_line
from .._schemas.config import load_config


def launch(
    config: Annotated[Path, typer.Argument(help="A YAML file with the commands of the trainer and the environments.")],
) -> None:
    """Start a gateway, a trainer and environments of Atropos, and end all of them with the trainer."""
    from .._stages.integrations.atropos.launch import launch as run_programs  # noqa: PLC0415 (not needed for --help)
    from .._stages.integrations.atropos.launch_config import LaunchConfig  # noqa: PLC0415

    programs = load_config(LaunchConfig, config, root="launch")
    raise typer.Exit(anyio.run(run_programs, programs, print_line))
