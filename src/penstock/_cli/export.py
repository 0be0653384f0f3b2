"""`penstock export`: the model of a run as a folder for transformers and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of one checkpoint.")],
    *,
    hf: Annotated[Path, typer.Option(help="Folder to write.")],
    merge: Annotated[bool, typer.Option(help="Add adapters to the weights; else they stay files of their own.")] = True,
) -> None:
    """Write the newest model of a run into a folder that transformers and vLLM load."""
    from .. import models  # noqa: PLC0415 (needs torch, which --help does not)

    models.export(run, hf, merge=merge)
    typer.echo(f"wrote {hf}")
