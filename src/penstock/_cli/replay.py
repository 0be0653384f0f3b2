"""`penstock replay`: train the batches of a recorded run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .run import train_as


def replay(
    run: Annotated[Path, typer.Argument(help="The folder of a run with record: true.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace those of the run: algorithm.loss=gspo")
    ] = None,
    *,
    folder: Annotated[str | None, typer.Option(help="The folder of the replay; RUN-replay by default.")] = None,
    step: Annotated[int | None, typer.Option(help="End after this step; all steps by default.")] = None,
) -> None:
    """Train what a run has recorded, without sampling: to the same weights, or with another loss.

    A replay whose folder has a checkpoint is continued.
    """
    from ..runs import load_replay_config  # noqa: PLC0415 (not needed for --help)

    given = [*(overrides or ()), *([] if folder is None else [f"folder={folder}"])]
    given += [] if step is None else [f"replay.last={step}"]
    train_as(load_replay_config(run, given), ["replay", str(run), *given])
