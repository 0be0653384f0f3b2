"""`penstock init`: a folder with a configuration, a reward function and a few rows, to begin from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from .._pipeline.errors import InvalidConfig
from .._pipeline.util.atomic_file import write_atomically

FILES = ("config.yaml", "reward.py", "data.jsonl")


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make; one that exists must have none of the files.")],
) -> None:
    """Write config.yaml, reward.py and data.jsonl, with 20 rows, into a folder."""
    present = [name for name in FILES if (folder / name).exists()]
    if present:
        raise InvalidConfig(f"{folder}: expected a folder without {', '.join(present)}: take another one")
    folder.mkdir(parents=True, exist_ok=True)
    template = files("penstock._cli") / "template"
    for name in FILES:
        write_atomically(folder / name, (template / name).read_bytes())
    typer.echo(f"wrote {', '.join(FILES)} into {folder}")
    typer.echo(f"next: cd {folder} && penstock run config.yaml model.path=FOLDER_OF_A_MODEL")
