"""Where a gateway listens, for whom, and how much it takes at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from .....pipeline.errors import InvalidConfig
from .....schemas.numbers import normalize_counts
from ..shm.shm_way_in import CAPACITY_BYTES
from .bodies import Limits

__all__ = ["DEFAULT_PORT", "Door"]

DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """What is true of every gateway, whatever it is for.

    Raises:
        InvalidConfig: no header can carry the token, or everybody can; or a size is none.
    """

    host: str = "127.0.0.1"
    """Where to listen; beyond loopback only with a token."""
    port: int = DEFAULT_PORT
    """Where to listen; 0 for a free one."""
    token: str | None = field(default=None, repr=False)
    """What clients have to bring, as a bearer token or as the password in their URL."""
    limits: Limits = field(default_factory=Limits)
    """How large requests may be."""
    shm_bytes: int = CAPACITY_BYTES
    """Of groups that an environment on this host may have on their way through shared memory, which holds so much for
    each. A group that is larger goes over HTTP."""
    cors: bool = False
    """Whether any web page may read and write here, as with the original."""

    def __post_init__(self) -> None:
        normalize_counts(self, "shm_bytes")
        normalize_counts(self, "port", least=0)
        token = self.token
        if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
            raise InvalidConfig(
                "Door.token: expected printable ASCII that neither begins nor ends with a space, which is what headers "
                f"carry, got {'an empty one' if not token else 'another'}; without a token it is None"
            )
