"""The environment of scripts in which a warning is an error, unless a foreign module warns of itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["strict"]


def strict(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environment` with the filters of tests/strict/sitecustomize.py; workers inherit them."""
    paths = [str(Path(__file__).with_name("strict")), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
