"""The configuration of a gateway's server."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....._pipeline.errors import InvalidConfig
from ....._schemas.numbers import normalize_counts
from ....http.limits import Limits
from .shm_receiver import CAPACITY_BYTES

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, access and limits of a gateway.

    >>> ServerConfig(token="from the environment").port
    8000

    Raises:
        InvalidConfig: the token cannot be sent in a header, a key has no certificate, or a size is not positive.
    """

    host: str = "127.0.0.1"
    """Address to listen at; beyond loopback only with a token."""
    port: int = DEFAULT_PORT
    """0 for a free one."""
    token: str | None = field(default=None, repr=False)
    """Secret that clients send, as a bearer token or as the password in their URL."""
    certfile: str | None = None
    """Path of the certificate chain in PEM; with it the gateway speaks https."""
    keyfile: str | None = None
    """Path of the certificate's key in PEM; None if `certfile` holds it too."""
    limits: Limits = field(default_factory=Limits)
    """Bounds on requests and connections."""
    shm_bytes: int = CAPACITY_BYTES
    """Shared memory for each environment on this host that sends through it. A larger group goes over HTTP."""

    def __post_init__(self) -> None:
        normalize_counts(self, "shm_bytes")
        normalize_counts(self, "port", least=0)
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise InvalidConfig(
                "ServerConfig.token: expected printable ASCII that neither begins nor ends with a space, as in "
                f"headers, got {'an empty one' if not token else 'another'}; without a token it is None"
            )
        if self.keyfile is not None and self.certfile is None:
            raise InvalidConfig(
                "ServerConfig.keyfile: expected a certfile beside it, got none: name the certificate that the key "
                "belongs to (certfile=, --certfile)"
            )
