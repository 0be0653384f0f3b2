"""`penstock init`: a folder with a configuration, a reward function and a few rows, to begin from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from .._pipeline.errors import InvalidConfig
from .._pipeline.util.atomic_file import write_atomically

FILES = ("config.yaml", "reward.py", "data.jsonl")

TINY_FILES = (*FILES, "model")


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make; one that exists must have none of the files.")],
    *,
    tiny: Annotated[bool, typer.Option("--tiny", help="Also make a small model, which learns within minutes.")] = False,
) -> None:
    """Write config.yaml, reward.py and data.jsonl into a folder; with --tiny those of a small model, and the model."""
    names = TINY_FILES if tiny else FILES
    present = [name for name in names if (folder / name).exists()]
    if present:
        raise InvalidConfig(f"{folder}: expected a folder without {', '.join(present)}: take another one")
    folder.mkdir(parents=True, exist_ok=True)
    if tiny:
        _write_tiny(folder)
    else:
        _copy("template", FILES, folder)
    typer.echo(f"wrote {', '.join(names)} into {folder}")
    typer.echo(f"next: cd {folder} && penstock run config.yaml{'' if tiny else ' model.path=FOLDER_OF_A_MODEL'}")


def _write_tiny(folder: Path) -> None:
    from .tiny import write_model, write_words  # noqa: PLC0415 (not needed for --help)

    write_model(folder / "model")
    write_words(folder / "data.jsonl")
    _copy("template_tiny", ("config.yaml", "reward.py"), folder)


def _copy(template: str, names: tuple[str, ...], folder: Path) -> None:
    for name in names:
        write_atomically(folder / name, (files("penstock._cli") / template / name).read_bytes())
