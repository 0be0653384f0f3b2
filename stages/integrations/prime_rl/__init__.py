"""prime-rl: its trainer as the sink of a pipeline."""

from .sink import PrimeRLSink
from .trainer import PrimeRLTrainer

__all__ = ["PrimeRLSink", "PrimeRLTrainer"]
