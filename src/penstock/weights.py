"""Publish weights to the processes that sample, through shared memory and over tcp."""

from __future__ import annotations

from ._pipeline.weights.weight_address import WeightAddress
from ._pipeline.weights.weight_publisher import WeightPublisher
from ._pipeline.weights.weight_specs import FusedTensor
from ._pipeline.weights.weight_subscriber import WeightSubscriber

__all__ = ["FusedTensor", "WeightAddress", "WeightPublisher", "WeightSubscriber"]
