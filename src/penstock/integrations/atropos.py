"""Environments and trainers that were written for Atropos."""

from __future__ import annotations

from .._stages.integrations.atropos import (
    Action,
    AtroposAPIError,
    AtroposClient,
    AtroposEnvironment,
    AtroposGateway,
    AtroposTrainers,
    GatewayDisconnected,
    Limits,
    ServerConfig,
    ShmTransport,
    register_with_gem,
    submit,
    submitting,
)

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
