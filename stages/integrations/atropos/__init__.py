"""Atropos: its environments as sources, its trainers as sinks."""

from .gateway import AtroposGateway
from .trainers import AtroposTrainers
from .transport import ShmTransport

__all__ = ["AtroposGateway", "AtroposTrainers", "ShmTransport"]
