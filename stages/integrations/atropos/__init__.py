"""Atropos: its environments as sources, its trainers as sinks."""

from .api_error import AtroposAPIError
from .client import AtroposClient
from .conversation import Action
from .gateway import AtroposGateway
from .stepwise import AtroposEnvironment, register_with_gem
from .trainers import AtroposTrainers
from .transport import ShmTransport

__all__ = [
    "Action",
    "AtroposAPIError",
    "AtroposClient",
    "AtroposEnvironment",
    "AtroposGateway",
    "AtroposTrainers",
    "ShmTransport",
    "register_with_gem",
]
