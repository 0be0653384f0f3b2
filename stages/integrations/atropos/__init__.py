"""Atropos: its environments as sources, its trainers as sinks."""

from .api_error import AtroposAPIError
from .client import AtroposClient
from .gateway import AtroposGateway
from .trainers import AtroposTrainers
from .transport import ShmTransport

__all__ = ["AtroposAPIError", "AtroposClient", "AtroposGateway", "AtroposTrainers", "ShmTransport"]
