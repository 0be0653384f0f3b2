"""The command `penstock`: the commands, one in each file; `app.py` joins them."""

from .app import main

__all__ = ["main"]
