"""Atropos: its environments as sources, its trainers as sinks."""

from .api_error import AtroposAPIError
from .bodies import Limits
from .client import AtroposClient
from .conversation import Action
from .door import Door
from .gateway import AtroposGateway
from .habits import Habits
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
    "Door",
    "Habits",
    "Limits",
    "ShmTransport",
    "register_with_gem",
]
