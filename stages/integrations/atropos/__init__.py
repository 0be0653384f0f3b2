"""Atropos: its environments as sources, its trainers as sinks."""

from .api_error import AtroposAPIError
from .client import AtroposClient
from .server.bodies import Limits
from .server.door import Door
from .server.gateway import AtroposGateway
from .server.trainers import AtroposTrainers
from .shm.transport import ShmTransport
from .steps.messages import Action
from .steps.stepwise import AtroposEnvironment, register_with_gem

__all__ = [
    "Action",
    "AtroposAPIError",
    "AtroposClient",
    "AtroposEnvironment",
    "AtroposGateway",
    "AtroposTrainers",
    "Door",
    "Limits",
    "ShmTransport",
    "register_with_gem",
]
