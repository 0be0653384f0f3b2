"""prime-rl's trainer as the end of a pipeline. Needs torch, to read its weights."""

from __future__ import annotations

from .._pipeline.util.extras import extra

with extra("torch", "penstock.integrations.prime_rl"):
    from .._stages.integrations.prime_rl import PrimeRLSink, PrimeRLTrainer

__all__ = ["PrimeRLSink", "PrimeRLTrainer"]
