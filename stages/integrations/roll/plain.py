"""ROLL's configuration as plain values: OmegaConf's containers to those of Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(config: Any) -> Any:
    """Return the mappings and lists in `config` as dicts and lists, all the way down."""
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, str) or not hasattr(config, "__iter__"):
        return config
    return [plain(value) for value in config]
