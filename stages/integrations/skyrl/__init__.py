"""SkyRL: a flow as the generator of its trainers, synchronous and fully asynchronous, without inference engines."""

from .entry import main
from .generator import PenstockGenerator
from .sampling import SampleRequests, SkyRLPrompts

__all__ = ["PenstockGenerator", "SampleRequests", "SkyRLPrompts", "main"]
