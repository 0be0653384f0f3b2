"""Pauses between attempts that tests can wait for."""

from dataclasses import replace
from typing import Any

from penstock.policies import HttpPolicy

__all__ = ["backoff"]

DEFAULT = HttpPolicy(url="http://127.0.0.1:1", model="none").backoff


def backoff(**changed: Any) -> Any:
    """Return the default `backoff` of a policy with these fields changed."""
    return replace(DEFAULT, **changed)
