"""`WeightAddress`: the address of a publisher's weights for samplers of any host."""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from ..channels.heartbeat import DEFAULT_HEARTBEAT_TIMEOUT_S
from ..channels.keys import ChannelKey
from ..errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class WeightAddress:
    """The address of weights that `WeightPublisher.serve` serves; it can be pickled, and contains the key."""

    url: str
    """`tcp://HOST:PORT`, for other hosts."""
    key: ChannelKey
    """The key of the connection."""
    local: str
    """The publisher's URL for processes of its own host: they share its memory."""
    host: str
    """The identity of its host."""
    generation: int
    """The generation of its segment: another publisher at `url` has another one."""
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S
    """Seconds without a sign of life until either side takes the connection for cut."""
    trusted_link: bool = False
    """True if the connection is not encrypted; see `WeightPublisher.serve`."""

    @property
    def mirror(self) -> str:
        """The name of a host's directory for its one process that receives these weights; short: sockets lie in it."""
        return mirror_name(self.url, self.generation)

    def check_reachable(self) -> None:
        """Check that `url` has a host that another one can connect to.

        Raises:
            InvalidConfig: it is the wildcard that the publisher listens on.
        """
        host = urlsplit(self.url).hostname or ""
        if host.strip("0.:") == "" and ip_address(host).is_unspecified:
            raise InvalidConfig(
                f"expected an address by which this host reaches the publisher's, got {self.url}, on which that one "
                f"listens: give samplers dataclasses.replace(address, url='tcp://HOST:PORT')"
            )


def mirror_name(place: str, generation: int) -> str:
    """Return the name of the directory for the mirror of the publisher with `generation` at `place`."""
    identity = f"{place} {generation} {os.getuid()}"
    return base64.b32encode(hashlib.sha256(identity.encode()).digest())[:8].decode().lower()
