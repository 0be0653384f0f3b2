"""Two network namespaces with one link between them, which can be set down: `ip link set down`.

The namespaces have no names: each exists as long as its holder process, which dies with the driver, and the link is
deleted with them. Needs root and iproute2.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

__all__ = ["FAR", "NEAR", "Link", "LinkNotPossible", "apart", "within"]

NEAR, FAR = "10.231.0.1", "10.231.0.2"
"""Addresses of the trainer's side and of the senders' side, the only ones in these namespaces."""


class LinkNotPossible(Exception):
    """This machine does not permit network namespaces, or has no iproute2."""


class Link:
    """The link between the namespaces of two processes.

    Raises:
        LinkNotPossible: the machine does not permit it.
    """

    def __init__(self, near_pid: int, far_pid: int) -> None:
        self._far_pid = far_pid
        _ip(near_pid, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(far_pid))
        for pid, device, address in (near_pid, "near", NEAR), (far_pid, "far", FAR):
            _ip(pid, "address", "add", f"{address}/24", "dev", device)
            _ip(pid, "link", "set", device, "up")
            _ip(pid, "link", "set", "lo", "up")

    def cut(self) -> None:
        """Set the link down."""
        _ip(self._far_pid, "link", "set", "far", "down")

    def restore(self) -> None:
        """Set the link up."""
        _ip(self._far_pid, "link", "set", "far", "up")


def within(pid: int | None) -> list[str]:
    """Return the prefix of a command that runs in the network namespace of `pid`, with the same process id."""
    return [] if pid is None else ["nsenter", "--net", "--target", str(pid)]


def apart() -> list[str]:
    """Return the prefix of a command that runs in a network namespace of its own.

    Raises:
        LinkNotPossible: the machine does not permit it.
    """
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        raise LinkNotPossible(f"expected {', '.join(missing)} on the path: apt install iproute2 util-linux")
    _checked(["unshare", "--net", "true"])
    return ["unshare", "--net"]


def _ip(pid: int, *arguments: str) -> None:
    _checked([*within(pid), "ip", *arguments])


def _checked(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (fixed commands)
    if ran.returncode:
        raise LinkNotPossible(f"{' '.join(command)}: {ran.stderr.strip()}")
