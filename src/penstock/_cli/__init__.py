"""The command `penstock`: the commands, one in each file, and `app.py`, which joins them."""

from .app import main

__all__ = ["main"]
