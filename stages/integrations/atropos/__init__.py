"""Atropos: its environments as sources, its trainers as sinks."""

from ...http.limits import Limits
from .api_error import AtroposAPIError
from .client import AtroposClient
from .server.gateway import AtroposGateway
from .server.server_config import ServerConfig
from .server.trainers import AtroposTrainers
from .steps.messages import Action
from .steps.stepwise import AtroposEnvironment, register_with_gem
from .submitter import GatewayDisconnected, ShmTransport, submit, submitting

__all__ = [
    "Action",
    "AtroposAPIError",
    "AtroposClient",
    "AtroposEnvironment",
    "AtroposGateway",
    "AtroposTrainers",
    "GatewayDisconnected",
    "Limits",
    "ServerConfig",
    "ShmTransport",
    "register_with_gem",
    "submit",
    "submitting",
]
