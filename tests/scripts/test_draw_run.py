"""The picture of a run shows what `penstock top` shows, and loads nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.commands.waiting_run import finish, printed

ROOT = Path(__file__).parents[2]


def drawn(run: Path, picture: Path) -> str:
    """Draw a run; return the texts of the picture."""
    subprocess.run([sys.executable, ROOT / "scripts/draw_run.py", run, picture], check=True)
    texts = ET.fromstring(picture.read_text()).itertext()  # noqa: S314 (our own file)
    return " ".join(" ".join(texts).split())


def test_the_picture_of_a_run_shows_its_last_view(tmp_path: Path) -> None:
    finish(tmp_path)

    shown = drawn(tmp_path, tmp_path / "run.svg")

    for part in ("step 12/12", "SinkTrainer", "best of step 12", printed("top", tmp_path).splitlines()[-1].split()[0]):
        assert part in shown


def test_the_picture_of_the_readme_loads_nothing() -> None:
    svg = (ROOT / "docs/images/run.svg").read_text()

    assert not re.search(r"@import|href|url\((?!#)", svg)
