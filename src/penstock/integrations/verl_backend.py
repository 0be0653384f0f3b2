"""Name penstock to verl as an engine, in each process of verl that imports this module.

actor_rollout_ref.model.external_lib=penstock.integrations.verl_backend
"""

from __future__ import annotations

import sys

from .._stages.integrations.verl.backend import register

__all__ = ["register"]

if "verl" in sys.modules:  # imported by verl
    register()
