"""The programs of `penstock launch`: a gateway, model servers, environments and the trainer, as a YAML file names them.

Imports no HTTP server or client.
"""

from __future__ import annotations

import shlex
import sys
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from ...._pipeline.errors import InvalidConfig
from ...._pipeline.servers.outside_server import http_ready
from ...._schemas.config import Config, check_url
from ...._schemas.numbers import normalize_numbers

Command: TypeAlias = str | list[str]
"""A program and its arguments: a line that is split as a shell would, or a list; there is no shell."""

OWN_NAMES = ("gateway", "trainer")
"""Names of logs, reserved: no server and no environment may have them."""


class ModelServer(Config, frozen=True):
    """A server that environments ask, such as one for inference."""

    command: Command
    ready: str
    """The URL that answers with a status of 2xx as soon as it can be used."""


class LaunchConfig(Config, frozen=True):
    """The programs that are launched, and ended in the reverse order.

    Raises:
        InvalidConfig: a value is out of its range, a name is given twice, or a command is empty.
    """

    trainer: Command
    """Registers with the gateway. Its output goes to the terminal; its exit status is that of the launch."""
    environments: dict[str, Command]
    """By their names in messages and logs. Each registers with the gateway."""
    servers: dict[str, ModelServer] = msgspec.field(default_factory=dict)
    """By their names, as above."""
    gateway: str = "http://127.0.0.1:8000"
    """The URL of `penstock gateway`; programs find it as ATROPOS_API_URL too."""
    logs: str = "logs"
    """Folder for the output of all but the trainer."""
    ready_timeout_s: float = 600.0
    """Seconds until each of them must be ready."""
    stop_timeout_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""

    def __post_init__(self) -> None:
        normalize_numbers(self, "ready_timeout_s", "stop_timeout_s")
        check_url(self.gateway, "gateway")
        if urlsplit(self.gateway).scheme != "http":
            raise InvalidConfig(f"gateway: expected http://host:port, got {self.gateway!r}")
        for name, server in self.servers.items():
            http_ready(server.ready)
            arguments(server.command, f"servers.{name}.command")
        for name, command in self.environments.items():
            arguments(command, f"environments.{name}")
        arguments(self.trainer, "trainer")
        names = [*self.servers, *self.environments]
        if wrong := sorted({name for name in names if names.count(name) > 1 or name in OWN_NAMES or "/" in name}):
            raise InvalidConfig(
                f"servers, environments: expected one name for each, without / and other than "
                f"{' and '.join(OWN_NAMES)}, got {', '.join(wrong)}"
            )
        if not self.environments:
            raise InvalidConfig("environments: expected at least one, got none: the trainer would wait for ever")

    @property
    def gateway_command(self) -> list[str]:
        """Return the command of the gateway."""
        parts = urlsplit(self.gateway)
        address = ["--host", parts.hostname or "", "--port", str(parts.port or 80)]
        return [sys.executable, "-m", "penstock", "gateway", *address]


def arguments(command: Command, field: str) -> list[str]:
    """Return the program and its arguments.

    Raises:
        InvalidConfig: it is empty, or a quotation has no end; naming `field`.
    """
    try:
        found = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise InvalidConfig(f"{field}: expected a program and its arguments, got {command!r}: {error}") from None
    if not found:
        raise InvalidConfig(f"{field}: expected a program and its arguments, got {command!r}")
    return found
