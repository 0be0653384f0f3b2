"""Imported by verl with its own package: the entry point of the group `verl.plugins` in pyproject.toml names it."""

from __future__ import annotations

import sys

from .ray_cpus import check_before_waiting

if "verl" in sys.modules:  # imported by verl
    check_before_waiting()
